#include "lockstep/train/trained_part.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/parallel/module_state.h"
#include "lockstep/parallel/state_dict.h"
#include "lockstep/parallel/strategies/strategies.h"

namespace lockstep::detail {
namespace {

PrecisionOptions precision_options(const TrainerOptions& options, c10::Device device) {
  PrecisionOptions precision = options.precision;
  precision.device = device;
  return precision;
}

}  // namespace

TrainedPart::TrainedPart(OptimizerConfig config, const std::shared_ptr<TrainingModuleBase>& root,
                         const ProcessGroup& group, c10::Device device,
                         const TrainerOptions& options, int64_t steps_of_run,
                         const std::function<at::Tensor()>& example_input)
    : config_(std::move(config)),
      options_(options),
      module_(config_.module ? config_.module : root),
      buffers_(root->buffers()),
      precision_(precision_options(options, device)),
      finite_(options.on_nan, group, device) {
  if (config_.schedule.total_steps == 0) config_.schedule.total_steps = steps_of_run;
  strategy_ = make_strategy(options.strategy, setup(root, group, device, example_input));
  base_lr_ = strategy_->lr();
  if (strategy_->needs_closure()) check_closure();
}

/// What an optimizer that evaluates the loss several times in a step does not go with.
void TrainedPart::check_closure() const {
  const std::string what =
      "optimizer " + optimizer_name_ + " evaluates the loss of a batch several times in a step, ";
  if (precision_.scales()) {
    throw UsageError(what +
                         "which a loss scale does not go with: all of them would have to overflow "
                         "alike",
                     "take --precision 32-true or bf16-mixed, without a --loss-scale");
  }
  if (options_.accumulate_grad_batches > 1) {
    throw UsageError(what + "but of " + std::to_string(options_.accumulate_grad_batches) +
                         " batches a step only the last one is at hand",
                     "take one larger batch in place of --accumulate-grad-batches");
  }
}

StrategySetup TrainedPart::setup(const std::shared_ptr<TrainingModuleBase>& root,
                                 const ProcessGroup& group, c10::Device device,
                                 const std::function<at::Tensor()>& example_input) {
  StrategySetup setup;
  setup.module = module_;
  if (SupervisedModule* const supervised = root->as_supervised()) {
    setup.layers = supervised->layers();
    setup.forward = supervised->forward_of_copies();
    if (example_input) {
      setup.example_input = [this, example_input] {
        const at::Tensor example = example_input();
        return example.defined() ? precision_.convert_input(example) : example;
      };
    }
  }
  setup.make_optimizer = precision_.optimizer_factory([this](std::vector<at::Tensor> parameters) {
    auto optimizer = config_.make(std::move(parameters));
    optimizer_name_ = optimizer->name();
    return optimizer;
  });
  setup.group = group;
  setup.device = device;
  setup.options = options_.strategy_options;
  setup.options.forward_context = precision_.forward_context();
  return setup;
}

void TrainedPart::begin_step() {
  if (std::exchange(in_step_, true)) return;
  finite_.begin_step();
  if (options_.on_nan != OnNan::skip) return;
  kept_buffers_.clear();
  for (const at::Tensor& buffer : buffers_) kept_buffers_.push_back(buffer.clone());
}

at::Tensor TrainedPart::judged(at::Tensor loss, double value, int64_t batches_of_step) {
  // A line search may try what is not finite. A step that ends there shows in the next loss.
  if (evaluates_again_) return loss;
  if (batches_of_step > 1) loss = loss / static_cast<double>(batches_of_step);
  // The gradients of a loss that is infinite may be finite: all of them are to be NaN.
  if (!finite_.loss_is_good(value)) loss = loss * std::numeric_limits<double>::quiet_NaN();
  return precision_.scale(loss);
}

void TrainedPart::finish_step(int64_t step, int64_t epoch, const Evaluation& evaluation) {
  const double lr = config_.lr_at ? config_.lr_at(updates_, base_lr_)
                                  : scheduled_lr(config_.schedule, base_lr_, updates_);
  if (lr != strategy_->lr()) strategy_->set_lr(lr);
  ++updates_;
  ++updates_of_epoch_;
  in_step_ = false;
  const std::vector<at::Tensor> gradients = strategy_->gradients();
  const bool sharded = strategy_->has_sharded_gradients();
  const StepScale scale =
      precision_.unscale(gradients, sharded ? strategy_->group() : ProcessGroup());
  FiniteCheck::Found found{gradients, sharded};
  if (precision_.expects_overflow()) found.overflowed = precision_.skipped();
  if (finite_.step_is_good(found, step, epoch)) {
    if (options_.gradient_clip_val > 0 && !found.overflowed.value_or(false)) clip();
    strategy_->needs_closure() ? step_with(evaluation) : strategy_->step(scale);
  } else {
    // Forward has put the batch into batch norm's statistics before anyone knows that it is bad.
    for (size_t i = 0; i < kept_buffers_.size(); ++i) buffers_[i].copy_(kept_buffers_[i]);
  }
  strategy_->zero_grad();
  precision_.update();
}

/// The first loss, and the gradients, are those of the batch as the step loop has run it.
void TrainedPart::step_with(const Evaluation& evaluation) {
  bool is_first = true;
  evaluates_again_ = true;
  strategy_->step_with([&] {
    if (std::exchange(is_first, false)) return evaluation.loss;
    strategy_->zero_grad();
    const double loss = evaluation.again();
    if (options_.gradient_clip_val > 0) clip();
    return loss;
  });
  evaluates_again_ = false;
}

void TrainedPart::clip() {
  precision_.clip_grad_norm(options_.gradient_clip_val,
                            [this](double most) { return strategy_->clip_grad_norm(most); });
}

void TrainedPart::end_epoch(int64_t epoch, bool from_its_start) {
  finite_.end_epoch(epoch, std::exchange(updates_of_epoch_, 0), from_its_start);
}

namespace {

void check_configs(const std::vector<OptimizerConfig>& configs, const TrainingModuleBase& module) {
  if (configs.empty()) {
    throw UsageError("configure_optimizers gave no optimizer",
                     "return {{.make = lockstep::optimizer_factory(\"adam\")}}");
  }
  std::set<std::string> names;
  for (const OptimizerConfig& config : configs) {
    if (!config.make) {
      throw UsageError("configure_optimizers gave an optimizer without `make`",
                       ".make = lockstep::optimizer_factory(\"adam\")");
    }
    if (configs.size() > 1 && config.name.empty()) {
      throw UsageError("configure_optimizers gave several optimizers, of which one has no name",
                       "give each a .name, by which `update` knows it");
    }
    if (!names.insert(config.name).second) {
      throw UsageError("configure_optimizers gave two optimizers of the name '" + config.name +
                       "'");
    }
  }
  if (configs.size() > 1 && module.automatic_optimization()) {
    throw UsageError("configure_optimizers gave " + std::to_string(configs.size()) +
                         " optimizers, but automatic optimization knows one loss",
                     "let automatic_optimization() give false, and call update(NAME, LOSS) in "
                     "training_step");
  }
}

void check_disjoint(const std::vector<OptimizerConfig>& configs) {
  std::map<const c10::TensorImpl*, const OptimizerConfig*> seen;
  for (const OptimizerConfig& config : configs) {
    if (configs.size() > 1 && !config.module) {
      throw UsageError("optimizer '" + config.name + "' has the whole module",
                       "where there are several, each needs a .module of its own");
    }
    if (!config.module) continue;
    for (const auto& item : config.module->named_parameters()) {
      const auto owner = seen.emplace(item.value().unsafeGetTensorImpl(), &config).first->second;
      if (owner == &config) continue;  // Also where one tensor has two names.
      throw UsageError("parameter " + item.key() + " of optimizer '" + config.name +
                           "' belongs to another optimizer, too",
                       "one parameter, one optimizer");
    }
  }
}

/// "" for the only part: then names are those that its module has by itself.
std::string prefix_of(const TrainedPart& part, const TrainedParts& parts) {
  return parts.size() == 1 ? "" : part.name() + ".";
}

void add_prefix(const std::string& prefix, std::pair<std::string, at::Tensor>& item) {
  item.first = prefix + item.first;
}
void add_prefix(const std::string& prefix, TensorShard& shard) {
  shard.name = prefix + shard.name;
}

/// What `of` gives of each part, with the part's prefix before each name.
template <class Of>
auto of_parts(const TrainedParts& parts, const Of& of) {
  decltype(of(*parts.front())) all;
  for (const auto& part : parts) {
    for (auto& item : of(*part)) {
      add_prefix(prefix_of(*part, parts), item);
      all.push_back(std::move(item));
    }
  }
  return all;
}

/// An optimizer without copies of the weights would call them unknown.
void check_copies_fit(const StateDict& state, const Precision& precision) {
  const bool has_copies = std::any_of(state.begin(), state.end(), [](const auto& item) {
    return item.first.starts_with("master_param.");
  });
  if (!has_copies || precision.name().starts_with("O2")) return;
  throw CheckpointError(
      "the checkpoint is of amp level O2, with float32 copies of the weights; precision " +
          precision.name() + " has none",
      "resume with --amp-level O2, or begin anew from its weights: --load-weights");
}

}  // namespace

TrainedParts make_parts(const std::shared_ptr<TrainingModuleBase>& module,
                        const ProcessGroup& group, c10::Device device,
                        const TrainerOptions& options, int64_t steps_of_run,
                        const std::function<at::Tensor()>& example_input) {
  const std::vector<OptimizerConfig> configs = module->configure_optimizers();
  check_configs(configs, *module);
  check_disjoint(configs);
  Precision(precision_options(options, device)).convert(*module);
  TrainedParts parts;
  for (const OptimizerConfig& config : configs) {
    parts.push_back(std::make_unique<TrainedPart>(config, module, group, device, options,
                                                  steps_of_run, example_input));
  }
  if (group.size() > 1) {
    std::vector<at::Tensor> others;
    for (auto& [name, tensor] : tensors_of_no_part(*module, parts)) {
      others.push_back(tensor.detach());
    }
    if (!others.empty()) broadcast_tensors(others, group);
  }
  return parts;
}

std::vector<at::Tensor> freeze_others(const TrainedParts& parts, const TrainedPart& one) {
  std::vector<at::Tensor> frozen;
  for (const auto& part : parts) {
    if (part.get() == &one) continue;
    for (const at::Tensor& parameter : part->module().parameters()) {
      if (!parameter.requires_grad()) continue;
      frozen.push_back(parameter);
      frozen.back().set_requires_grad(false);
    }
  }
  return frozen;
}

StateDict tensors_of_no_part(const TrainingModuleBase& root, const TrainedParts& parts) {
  std::set<const c10::TensorImpl*> taken;
  for (const auto& part : parts) {
    for (const auto& [name, tensor] : state_dict(part->module())) {
      taken.insert(tensor.unsafeGetTensorImpl());
    }
  }
  StateDict others;
  for (const auto& [name, tensor] : state_dict(root)) {
    if (!taken.contains(tensor.unsafeGetTensorImpl())) others.emplace_back(name, tensor.detach());
  }
  return others;
}

StateDict model_state(const TrainingModuleBase& root, const TrainedParts& parts) {
  StateDict all = of_parts(parts, [](TrainedPart& part) { return part.strategy().model_state(); });
  if (parts.front()->strategy().group().rank() != 0) return all;
  for (auto& item : tensors_of_no_part(root, parts)) all.push_back(std::move(item));
  return all;
}

StateDict own_model_state(const TrainingModuleBase& root, const TrainedParts& parts) {
  StateDict all = of_parts(parts, [](TrainedPart& part) { return state_dict(part.module()); });
  for (auto& item : tensors_of_no_part(root, parts)) all.push_back(std::move(item));
  return all;
}

StateDict optimizer_state(const TrainedParts& parts) {
  return of_parts(parts, [](TrainedPart& part) { return part.strategy().optimizer_state(); });
}

std::vector<TensorShard> model_shards(const TrainingModuleBase& root, const TrainedParts& parts) {
  auto all = of_parts(parts, [](TrainedPart& part) { return part.strategy().model_shards(); });
  if (parts.front()->strategy().group().rank() != 0) return all;
  for (auto& shard : whole_shards(tensors_of_no_part(root, parts))) all.push_back(std::move(shard));
  return all;
}

std::vector<TensorShard> optimizer_shards(const TrainedParts& parts) {
  return of_parts(parts, [](TrainedPart& part) { return part.strategy().optimizer_shards(); });
}

WantedBoxes needed_of_model(const TrainedParts& parts) {
  std::map<std::string, std::vector<TensorBox>> needed;
  for (const auto& part : parts) {
    for (auto& [name, boxes] : part->strategy().needed_of_model())
      needed.emplace(prefix_of(*part, parts) + name, std::move(boxes));
  }
  return [needed = std::move(needed)](const std::string& name) {
    const auto found = needed.find(name);
    return found == needed.end() ? nullptr : &found->second;
  };
}

WantedBoxes needed_of_optimizer(const TrainedParts& parts) {
  // By the part's prefix and the parameter's index: ".3".
  std::map<std::string, std::map<std::string, std::vector<TensorBox>>> needed;
  for (const auto& part : parts) {
    for (auto& [index, boxes] : part->strategy().needed_of_optimizer())
      needed[prefix_of(*part, parts)].emplace("." + std::to_string(index), std::move(boxes));
  }
  return [needed = std::move(needed)](const std::string& name) -> const std::vector<TensorBox>* {
    const std::string index = name.substr(std::min(name.rfind('.'), name.size()));
    for (const auto& [prefix, boxes] : needed) {
      const auto found = name.starts_with(prefix) ? boxes.find(index) : boxes.end();
      if (found != boxes.end()) return &found->second;
    }
    return nullptr;
  };
}

StateDict precision_state(const TrainedParts& parts) {
  return of_parts(parts, [](TrainedPart& part) { return part.precision().state(); });
}

void load_precision_state(const TrainedParts& parts, const StateDict& state) {
  for (const auto& part : parts) {
    part->precision().load_state(with_prefix_removed(state, prefix_of(*part, parts)));
  }
}

void load_model_state(TrainingModuleBase& root, const TrainedParts& parts, const StateDict& state) {
  std::map<std::string, at::Tensor> others;
  for (auto& item : tensors_of_no_part(root, parts)) others.insert(std::move(item));
  StateDict of_parts;
  for (const auto& [name, tensor] : state) {
    const auto found = others.find(name);
    if (found == others.end()) {
      of_parts.emplace_back(name, tensor);
      continue;
    }
    if (found->second.sizes() != tensor.sizes()) {
      throw CheckpointError("the checkpoint's model.safetensors does not fit the module: " + name +
                            " has another shape");
    }
    found->second.copy_(tensor);
    others.erase(found);
  }
  if (!others.empty())
    throw CheckpointError("the checkpoint's model.safetensors lacks " + others.begin()->first);
  for (const auto& part : parts) {
    part->strategy().load_model_state(with_prefix_removed(of_parts, prefix_of(*part, parts)));
  }
}

void load_optimizer_state(const TrainedParts& parts, const StateDict& state) {
  for (const auto& part : parts) {
    const StateDict own = with_prefix_removed(state, prefix_of(*part, parts));
    check_copies_fit(own, part->precision());
    part->strategy().load_optimizer_state(own);
  }
}

}  // namespace lockstep::detail
