#include "lockstep/parallel/pipeline/pipeline_strategy.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/device_mesh.h"
#include "lockstep/parallel/pipeline/micro_batches.h"
#include "lockstep/parallel/pipeline/schedule_runner.h"
#include "lockstep/parallel/pipeline/stage_state.h"
#include "lockstep/parallel/scaled_copy.h"
#include "lockstep/parallel/whole_model.h"

namespace lockstep {
namespace {

void expect_layers(const StrategySetup& setup) {
  if (!setup.layers.empty()) return;
  throw UsageError("strategy pipeline: the model is not known as a chain of layers",
                   "override layers() of a Trainer's module, give StrategySetup::layers, or take a "
                   "strategy that needs none, such as fsdp");
}

std::vector<MeshDimension> dimensions_of(const StrategyOptions& options, int ranks) {
  const std::string& text = options.mesh;
  auto dimensions = parse_mesh(text.empty() ? "pp=-1" : text, ranks);
  bool has_pipeline = false;
  for (const MeshDimension& dimension : dimensions) {
    has_pipeline = has_pipeline || dimension.name == "pp";
    if (dimension.name == "pp" || dimension.name == "dp") continue;
    throw UsageError("strategy pipeline: mesh '" + text + "' has a dimension '" + dimension.name +
                         "', with which a pipeline is not combined",
                     "its dimensions are pp, the stages, and dp, the pipelines beside each other: "
                     "--mesh dp=2,pp=2");
  }
  if (!has_pipeline) {
    throw UsageError("strategy pipeline: mesh '" + text + "' has no dimension pp, for the stages",
                     "--mesh dp=2,pp=2 makes two pipelines of two stages each");
  }
  return dimensions;
}

/// Of an option, which schedules count with.
int small_number(const char* option, int64_t value) {
  constexpr int64_t kMost = 1'000'000;
  if (value >= 0 && value <= kMost) return static_cast<int>(value);
  throw UsageError(std::string("strategy pipeline: ") + option + " is " + std::to_string(value) +
                   ", expected at most " + std::to_string(kMost) + ", and no less than 0");
}

PipelineShape shape_of(const StrategyOptions& options, int ranks) {
  return {ranks, small_number("num_micro_batches", options.num_micro_batches),
          small_number("pipeline_stages_per_rank", options.pipeline_stages_per_rank)};
}

/// What layers cost, and by what that is known.
struct LayerCosts {
  std::vector<double> costs;
  std::string by;
};

LayerCosts costs_of(const StrategySetup& setup) {
  const StrategyOptions& options = setup.options;
  const bool by_time = options.pipeline_balance == "time" && setup.example_input;
  const at::Tensor batch = by_time ? setup.example_input() : at::Tensor();
  if (!batch.defined()) return {estimate_layer_costs(setup.layers), "parameters"};
  const int64_t rows =
      std::max<int64_t>(1, batch.size(0) / std::max<int64_t>(1, options.num_micro_batches));
  return {measure_layer_costs(setup.layers, batch.narrow(0, 0, rows).to(setup.device),
                              options.forward_context),
          "time"};
}

/// "stage 0 on rank 0: layers.0 (61% of time), stage 1 on rank 1: layers.1 to layers.4 (39%)".
std::string text_of(const std::vector<size_t>& starts, const std::vector<Layer>& layers,
                    const LayerCosts& known, int ranks) {
  const double all = std::accumulate(known.costs.begin(), known.costs.end(), 0.0);
  std::vector<std::string> stages;
  for (size_t stage = 0; stage < starts.size(); ++stage) {
    const size_t first = starts[stage];
    const size_t end = stage + 1 < starts.size() ? starts[stage + 1] : layers.size();
    const auto cost = known.costs.begin();
    const double part = std::accumulate(cost + static_cast<std::ptrdiff_t>(first),
                                        cost + static_cast<std::ptrdiff_t>(end), 0.0);
    const std::string percent = std::to_string(std::lround(100 * part / all)) + "%";
    stages.push_back("stage " + std::to_string(stage) + " on rank " +
                     std::to_string(stage % static_cast<size_t>(ranks)) + ": " +
                     layers[first].name + (end == first + 1 ? "" : " to " + layers[end - 1].name) +
                     " (" + percent + (stage == 0 ? " of " + known.by : "") + ")");
  }
  return "pipeline: " + join(stages, ", ");
}

/// Rank 0's cut, for all.
std::vector<size_t> choose_stages(const StrategySetup& setup, int num_stages, int ranks) {
  const StrategyOptions& options = setup.options;
  expect_one_of("strategy pipeline: pipeline_balance", options.pipeline_balance,
                pipeline_balance_names());
  if (!options.pipeline_plan.empty()) {
    return planned_stages(setup.layers, options.pipeline_plan, num_stages);
  }
  std::vector<size_t> starts;
  // Before anyone waits for rank 0: all ranks know when there are too many stages.
  (void)balance_stages(std::vector<double>(setup.layers.size(), 1), num_stages);
  if (setup.group.rank() == 0) {
    const LayerCosts known = costs_of(setup);
    starts = balance_stages(known.costs, num_stages);
    if (setup.group.size() > 1) log_info(text_of(starts, setup.layers, known, ranks));
  }
  return setup.group.broadcast_object(starts, 0).get<std::vector<size_t>>();
}

/// Apart from the tags of the stages' own messages.
constexpr int kTiedTag = 1 << 21;

/// In which norms are added up. A norm of float16 gradients need not fit into float16.
at::ScalarType norm_dtype(const detail::StageTensors& tensors) {
  std::optional<at::ScalarType> widest;
  for (const detail::StageTensor& parameter : tensors.parameters()) {
    if (!parameter.tensor.requires_grad()) continue;
    const at::ScalarType own = parameter.tensor.scalar_type();
    const at::ScalarType dtype = own == at::kHalf ? at::kFloat : own;
    widest = widest ? c10::promoteTypes(*widest, dtype) : dtype;
  }
  return widest.value_or(at::kFloat);
}

/// What becomes of a stage's gradients after its last micro-batch: those of tied parameters are
/// summed over the stages that use them, and all are averaged over the ranks with the same stage.
class GradientExchange {
 public:
  /// `data_parallel`: the ranks with the same stages; null or of one rank: nothing is averaged.
  GradientExchange(const detail::StageTensors& tensors, ProcessGroup pipeline,
                   ProcessGroup data_parallel)
      : tensors_(tensors),
        pipeline_(std::move(pipeline)),
        data_parallel_(std::move(data_parallel)) {}

  /// Before a batch whose gradients add to those that are there.
  void begin() {
    if (!std::exchange(summed_, false)) return;
    const int me = pipeline_.rank();
    for (const detail::StageTensor& parameter : tensors_.parameters()) {
      if (parameter.ranks.size() > 1 && parameter.is_on(me) && parameter.owner() != me)
        parameter.tensor.mutable_grad().reset();
    }
  }
  /// Collectives of both groups.
  void run() {
    const at::NoGradGuard no_grad;
    sum_tied();
    summed_ = true;
    if (data_parallel_ && data_parallel_.size() > 1) average();
  }
  /// lockstep::clip_grad_norm over the parameters of all stages, each counted once, with the bits
  /// that one process gets. A collective of the pipeline.
  double clip_grad_norm(c10::Device device, double max_norm) const {
    if (pipeline_.size() == 1) return lockstep::clip_grad_norm(tensors_.own_parameters(), max_norm);
    constexpr int64_t kCountedElsewhere = -1;
    std::vector<at::Tensor> gradients;
    std::vector<int64_t> numbers;
    for (const size_t i : tensors_.own()) {
      const detail::StageTensor& parameter = tensors_.parameters()[i];
      if (!parameter.tensor.grad().defined()) continue;
      gradients.push_back(parameter.tensor.grad());
      const bool is_owner = parameter.owner() == pipeline_.rank();
      numbers.push_back(is_owner ? static_cast<int64_t>(i) : kCountedElsewhere);
    }
    // Each rank puts its own norms into a table of zeros, and a sum over the ranks, which changes
    // no bit, puts them together. Row 0: the norms. Row 1: whether there is one.
    return detail::clip_gradients(gradients, max_norm, [&](const auto& norms, const auto& places) {
      const auto count = static_cast<int64_t>(tensors_.parameters().size());
      at::Tensor table = at::zeros({2, count}, at::TensorOptions(device).dtype(at::kDouble));
      for (size_t i = 0; i < norms.size(); ++i) {
        const int64_t number = numbers[places[i]];
        if (number == kCountedElsewhere) continue;
        table[0][number].copy_(norms[i]);
        table[1][number].fill_(1);
      }
      pipeline_.all_reduce(table);
      const at::Tensor all = table[0].masked_select(table[1].gt(0)).to(norm_dtype(tensors_));
      return at::linalg_vector_norm(all, 2.0);
    });
  }
  /// The gradients were dropped.
  void forget() { summed_ = false; }

 private:
  /// The first rank that has a tied parameter sums in the order of ranks, so all get the same bits.
  void sum_tied() {
    const int me = pipeline_.rank();
    for (size_t i = 0; i < tensors_.parameters().size(); ++i) {
      const detail::StageTensor& parameter = tensors_.parameters()[i];
      if (parameter.ranks.size() == 1 || !parameter.is_on(me) ||
          !parameter.tensor.requires_grad()) {
        continue;
      }
      const int tag = kTiedTag + static_cast<int>(i);
      const at::Tensor& own = parameter.tensor.grad();
      at::Tensor sum = (own.defined() ? own : at::zeros_like(parameter.tensor)).contiguous();
      if (me != parameter.owner()) {
        pipeline_.send(sum, parameter.owner(), tag);
        pipeline_.recv(sum, parameter.owner(), tag);
      } else {
        at::Tensor other = at::empty_like(sum);
        for (const int rank : parameter.ranks) {
          if (rank == me) continue;
          pipeline_.recv(other, rank, tag);
          sum.add_(other);
        }
        for (const int rank : parameter.ranks) {
          if (rank != me) pipeline_.send(sum, rank, tag);
        }
      }
      parameter.tensor.mutable_grad() = sum;
    }
  }
  /// As DistributedDataParallel: each rank divides its own, then all are summed.
  void average() {
    std::vector<at::Tensor> parameters;
    for (const size_t i : tensors_.own()) {
      const at::Tensor& parameter = tensors_.parameters()[i].tensor;
      if (parameter.grad().defined()) parameters.push_back(parameter);
    }
    const auto same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
    if (!std::equal(parameters.begin(), parameters.end(), laid_out_.begin(), laid_out_.end(),
                    same)) {
      flat_ = flat_views(parameters, [this](int64_t elements, const at::TensorOptions& options) {
        return data_parallel_.symmetric_empty(elements, options.dtype().toScalarType());
      });
      laid_out_ = parameters;
    }
    const double share = 1.0 / data_parallel_.size();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& gradient = parameters[i].grad();
      at::Tensor& place = flat_.views[i];
      const bool in_place = gradient.const_data_ptr() == place.const_data_ptr();
      in_place ? static_cast<void>(place.mul_(share)) : detail::scaled_copy(place, gradient, share);
    }
    for (at::Tensor& memory : flat_.memory) data_parallel_.all_reduce(memory);
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = flat_.views[i];
  }

  const detail::StageTensors& tensors_;
  ProcessGroup pipeline_;
  ProcessGroup data_parallel_;
  bool summed_ = false;  ///< Tied parameters' gradients are the sums of all their stages.
  FlatViews flat_;       ///< The parameters' gradients, where the group sums without copies.
  std::vector<at::Tensor> laid_out_;
};

class PipelineStrategy final : public detail::SpreadStrategy {
 public:
  explicit PipelineStrategy(const StrategySetup& setup)
      : SpreadStrategy("pipeline", setup),
        setup_((expect_layers(setup), setup)),
        mesh_(setup.group, dimensions_of(setup.options, setup.group.size())),
        pipeline_(mesh_.get_group("pp")),
        schedule_(make_pipeline_schedule(setup.options.pipeline_schedule,
                                         shape_of(setup.options, pipeline_.size()))),
        tensors_(*setup.module, setup.layers, agreed_stages(), pipeline_.rank(), pipeline_.size()),
        model_(tensors_.spread_model(*setup.module, pipeline_)),
        spread_(tensors_.spread_optimizer(pipeline_)),
        exchange_(tensors_, pipeline_, mesh_.has("dp") ? mesh_.get_group("dp") : ProcessGroup()),
        link_(detail::make_group_link(pipeline_, setup.device)) {
    runner_ = std::make_unique<detail::ScheduleRunner>(
        pipeline_.rank(), pipeline_.size(), setup_.layers, starts_,
        detail::StageOptions{setup.device, setup.options.recompute_activations,
                             setup.options.forward_context},
        *link_);
    tensors_.free_others();
    parameters_ = tensors_.own_parameters();
    optimizer_ = setup.make_optimizer(optimized());
    detail::refuse_closure(
        *optimizer_, name(),
        "looks at all parameters as one vector, of which a rank has those of its stages only");
    setup_.layers.clear();
    setup_.example_input = nullptr;
  }

  DataShare data_share() const override {
    return pipeline_data_share(setup_.options, group().rank(), group().size());
  }

  void run_batch(const BatchWork& work) override {
    const detail::MicroBatches batches(work, schedule_);
    exchange_.begin();
    // A smaller batch at the end of an epoch may have fewer micro-batches.
    batches.size() == schedule_.num_micro_batches
        ? runner_->run(schedule_, batches)
        : runner_->run(detail::schedule_for(batches, schedule_), batches);
    adding_up_ = !work.last_of_step;
    if (!work.last_of_step) return;
    exchange_.run();
    ++steps_;
    for (const ProcessGroup& waits : {setup_.group, pipeline_}) waits.note_steps(steps_);
  }

  std::optional<at::Tensor> predict(const std::function<at::Tensor()>&,
                                    const at::Tensor& input) override {
    if (!input.defined()) {
      throw UsageError("strategy pipeline: predict needs the input, not only a forward");
    }
    at::Tensor output = runner_->predict(input);
    return output.defined() ? std::optional(std::move(output)) : std::nullopt;
  }

  void share_buffers() override {
    if (!mesh_.has("dp") || mesh_.size("dp") == 1) return;
    std::vector<at::Tensor> buffers;
    for (const detail::StageTensor& buffer : tensors_.buffers()) {
      if (buffer.is_on(pipeline_.rank())) buffers.push_back(buffer.tensor);
    }
    detail::broadcast_tensors(buffers, mesh_.get_group("dp"));
  }

  std::vector<at::Tensor> gradients() const override { return detail::gradients_of(parameters_); }
  bool has_sharded_gradients() const override { return pipeline_.size() > 1; }
  double clip_grad_norm(double max_norm) override {
    return exchange_.clip_grad_norm(setup_.device, max_norm);
  }

  void zero_grad() override {
    adding_up_ = false;
    exchange_.forget();
    lockstep::zero_grad(parameters_);
  }

  void load_model_state(const StateDict& state) override {
    model_.load(state, "the checkpoint's model.safetensors");
  }
  void load_optimizer_state(const StateDict& state) override {
    optimizer_->load_state(spread_.own_part(state, "strategy pipeline").first);
  }
  StateBytes state_bytes() const override {
    return {detail::bytes_of(parameters_), detail::bytes_of(gradients()),
            detail::bytes_of(optimizer_->state())};
  }

 private:
  detail::SpreadModel spread_model() override { return model_; }
  const detail::SpreadOptimizer& spread_optimizer() const override { return spread_; }
  bool gives_states() const override { return !mesh_.has("dp") || mesh_.get_local_rank("dp") == 0; }

  Optimizer& optimizer() const override { return *optimizer_; }

  /// Optimizers want at least one tensor. A stage of layers without parameters gives an empty one.
  std::vector<at::Tensor> optimized() const {
    if (!parameters_.empty()) return parameters_;
    return {at::empty({0}, at::TensorOptions(setup_.device)).requires_grad_()};
  }

  /// The first layers of the stages, once all ranks have rank 0's model.
  const std::vector<size_t>& agreed_stages() {
    if (setup_.group.size() > 1)
      detail::start_alike(detail::find_module_state(*setup_.module, {}, "strategy pipeline"),
                          setup_.group, "strategy pipeline");
    return starts_ = choose_stages(setup_, schedule_.num_stages, pipeline_.size());
  }

  StrategySetup setup_;
  DeviceMesh mesh_;
  ProcessGroup pipeline_;
  PipelineSchedule schedule_;
  std::vector<size_t> starts_;
  detail::StageTensors tensors_;
  detail::SpreadModel model_;
  detail::SpreadOptimizer spread_;
  GradientExchange exchange_;
  std::unique_ptr<detail::StageLink> link_;
  std::unique_ptr<detail::ScheduleRunner> runner_;
  std::vector<at::Tensor> parameters_;  ///< Of this rank's stages.
  std::unique_ptr<Optimizer> optimizer_;
  int64_t steps_ = 0;
};

}  // namespace

std::unique_ptr<Strategy> make_pipeline_strategy(const StrategySetup& setup) {
  return std::make_unique<PipelineStrategy>(setup);
}

DataShare pipeline_data_share(const StrategyOptions& options, int rank, int size) {
  // As DeviceMesh lays ranks out: row by row.
  DataShare share;
  int rest = rank;
  const auto dimensions = dimensions_of(options, size);
  for (auto dimension = dimensions.rbegin(); dimension != dimensions.rend(); ++dimension) {
    if (dimension->name == "dp") share = {rest % dimension->size, dimension->size};
    rest /= dimension->size;
  }
  return share;
}

}  // namespace lockstep
