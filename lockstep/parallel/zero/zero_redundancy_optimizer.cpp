#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"

#include <c10/core/GradMode.h>

#include <optional>
#include <unordered_map>
#include <utility>

#include "lockstep/base/call_origin.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/check_equal.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/optim/optimizer_state.h"
#include "lockstep/parallel/module_state.h"
#include "lockstep/parallel/whole_model.h"
#include "lockstep/parallel/zero/sharded_optimizer.h"

namespace lockstep {
namespace {

constexpr const char* kWhat = "ZeroRedundancyOptimizer";

void check_same_parameters(const std::vector<at::Tensor>& parameters, const ProcessGroup& group) {
  detail::ModuleState state;
  for (size_t i = 0; i < parameters.size(); ++i)
    state.parameters.push_back({std::to_string(i), parameters[i]});
  detail::check_same_state(state, group, kWhat);
}

/// A communication hook of DistributedDataParallel that averages a bucket's gradients and then
/// updates the bucket's parameters. While one bucket is averaged, the one before it is updated and
/// shared. All ranks make the same calls in the same order. On the thread that runs backward.
class OverlappedSteps {
 public:
  explicit OverlappedSteps(detail::ShardedOptimizer& optimizer) : optimizer_(optimizer) {
    const auto& parameters = optimizer_.shards().parameters();
    for (size_t i = 0; i < parameters.size(); ++i)
      index_of_[parameters[i].unsafeGetTensorImpl()] = i;
  }

  /// Begins with the bucket. What it returns is called at the end of backward.
  std::function<at::Tensor()> begin(const ProcessGroup& group, GradientBucket& bucket) {
    const c10::AutoGradMode no_grad(false);
    Averaged next{{}, bucket.gradients, {}};
    for (const at::Tensor& parameter : bucket.parameters) {
      const auto found = index_of_.find(parameter.unsafeGetTensorImpl());
      if (found == index_of_.end())
        throw UsageError("hook_with_zero_step: the module has a parameter that the optimizer lacks",
                         "give the optimizer all parameters that need a gradient");
      next.parameters.push_back(found->second);
    }
    next.gradients.div_(group.size());
    const CallOrigin origin("gradients", "ZeroRedundancyOptimizer");
    next.work = group.all_reduce_async(next.gradients);
    finish_open();
    open_ = std::move(next);
    return [this, gradients = bucket.gradients, last = bucket.is_last] {
      if (last) {
        finish_open();
        for (const Work& work : shared_) work.wait();
        shared_.clear();
      }
      return gradients;
    };
  }

 private:
  struct Averaged {
    Work work;
    at::Tensor gradients;
    std::vector<size_t> parameters;
  };

  /// A bucket's gradients lie one after the other, each in the order of its parameter's memory.
  void finish_open() {
    if (!open_) return;
    const c10::AutoGradMode no_grad(false);
    const Averaged bucket = *std::exchange(open_, std::nullopt);
    bucket.work.wait();
    for (int64_t at = 0; const size_t index : bucket.parameters) {
      const at::Tensor& parameter = optimizer_.shards().parameters()[index];
      optimizer_.take_gradient(index, view_like(bucket.gradients, at, parameter));
      at += parameter.numel();
    }
    optimizer_.update({});
    optimizer_.drop_gradients();
    for (Work& work : optimizer_.shards().share(bucket.parameters))
      shared_.push_back(std::move(work));
  }

  detail::ShardedOptimizer& optimizer_;
  std::unordered_map<const c10::TensorImpl*, size_t> index_of_;
  std::optional<Averaged> open_;  ///< The bucket that is not updated yet.
  std::vector<Work> shared_;
};

/// The entries of `count` parameters from `first` on, by indices from `to` on.
StateDict renumbered(const StateDict& state, size_t first, size_t count, size_t to) {
  StateDict result;
  for (const auto& [text, tensor] : state) {
    const StateKey key = parse_state_key(text);
    if (key.index >= first && key.index - first < count)
      result.emplace_back(state_key(key.name, key.index - first + to), tensor);
  }
  return result;
}

}  // namespace

struct ZeroRedundancyOptimizer::Impl {
  ProcessGroup group;
  std::vector<std::unique_ptr<detail::ShardedOptimizer>> groups = {};
  std::vector<at::Tensor> parameters = {};  ///< Of all groups.
  std::optional<StateDict> consolidated = {};
  std::function<bool()> adding_up = {};
  bool overlaps = false;
  bool checks_drift = true;  ///< Until a Join, in which ranks make different numbers of steps.
  int64_t steps = 0;
};

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters,
                                                 const OptimizerFactory& make,
                                                 const ProcessGroup& group)
    : impl_(new Impl{group}) {
  add_param_group(std::move(parameters), make);
}

void ZeroRedundancyOptimizer::add_param_group(std::vector<at::Tensor> parameters,
                                              const OptimizerFactory& make) {
  const ProcessGroup& group = impl_->group;
  if (!group) throw UsageError(std::string(kWhat) + ": the process group is null");
  if (parameters.empty()) throw UsageError(std::string(kWhat) + ": there are no parameters");
  parameters = unique_parameters(parameters);
  std::vector<at::Tensor> all = impl_->parameters;
  all.insert(all.end(), parameters.begin(), parameters.end());
  detail::trained_of(all, kWhat);
  if (group.size() > 1) check_same_parameters(parameters, group);
  impl_->groups.push_back(
      std::make_unique<detail::ShardedOptimizer>(std::move(parameters), make, group, kWhat));
  impl_->parameters = std::move(all);
}

ZeroRedundancyOptimizer::~ZeroRedundancyOptimizer() = default;

void ZeroRedundancyOptimizer::step_scaled(const StepScale& scale) {
  if (impl_->overlaps) return;
  if (impl_->adding_up && impl_->adding_up())
    throw UsageError(std::string(kWhat) + ", rank " + std::to_string(impl_->group.rank()) +
                         ": step() after a batch within no_sync, whose gradients only add up",
                     "run the last batch before each step outside of no_sync");
  Join::notify_join_context(*this);
  for (auto& group : impl_->groups) group->take_gradients();
  for (auto& group : impl_->groups) {
    group->step(scale);
    group->drop_gradients();
  }
  // Each part is updated by one rank, so another rate on some would not show in the parameters.
  if (impl_->checks_drift && detail::is_compared_after(++impl_->steps))
    detail::check_equal({kWhat, impl_->steps, {}, {{"learning rate", lr()}}}, impl_->group);
}

void ZeroRedundancyOptimizer::watch(std::function<bool()> adding_up) {
  impl_->adding_up = std::move(adding_up);
}

AsyncGradientHook ZeroRedundancyOptimizer::hook_with_zero_step() {
  if (impl_->groups.size() > 1)
    throw UsageError(std::string(kWhat) + ": only one group of parameters overlaps with backward");
  impl_->overlaps = true;
  auto steps = std::make_shared<OverlappedSteps>(*impl_->groups.front());
  return [steps](const ProcessGroup& group, GradientBucket& bucket) {
    return steps->begin(group, bucket);
  };
}

/// The step's collective calls, while others have inputs.
class ZeroRedundancyOptimizer::Hook : public JoinHook {
 public:
  explicit Hook(ZeroRedundancyOptimizer& optimizer) : optimizer_(optimizer) {}
  void main_hook() override { optimizer_.step(); }

 private:
  ZeroRedundancyOptimizer& optimizer_;
};

std::unique_ptr<JoinHook> ZeroRedundancyOptimizer::join_hook(const JoinOptions&) {
  if (impl_->overlaps)
    throw UsageError(std::string(kWhat) + ": a step that overlaps with backward cannot be joined",
                     "call step() in place of hook_with_zero_step()");
  impl_->checks_drift = false;
  return std::make_unique<Hook>(*this);
}

const ProcessGroup& ZeroRedundancyOptimizer::join_process_group() const {
  return impl_->group;
}

void ZeroRedundancyOptimizer::zero_grad(bool set_to_none) {
  lockstep::zero_grad(parameters(), set_to_none);
}

void ZeroRedundancyOptimizer::set_lr(double lr) {
  for (auto& group : impl_->groups) group->local().set_lr(lr);
}
double ZeroRedundancyOptimizer::lr() const {
  return impl_->groups.front()->local().lr();
}
const std::vector<at::Tensor>& ZeroRedundancyOptimizer::parameters() const {
  return impl_->parameters;
}
bool ZeroRedundancyOptimizer::takes_grad_scale() const {
  return std::ranges::all_of(impl_->groups,
                             [](const auto& group) { return group->local().takes_grad_scale(); });
}
const std::string& ZeroRedundancyOptimizer::name() const {
  return impl_->groups.front()->local().name();
}
bool ZeroRedundancyOptimizer::is_elementwise() const {
  return std::ranges::all_of(impl_->groups,
                             [](const auto& group) { return group->local().is_elementwise(); });
}

void ZeroRedundancyOptimizer::consolidate_state_dict(int to) {
  StateDict all;
  size_t first = 0;
  for (const auto& group : impl_->groups) {
    const size_t count = group->shards().parameters().size();
    const StateDict state =
        renumbered(group->spread().gather(group->local().state(), to), 0, count, first);
    all.insert(all.end(), state.begin(), state.end());
    first += count;
  }
  if (impl_->group.rank() == to) impl_->consolidated = std::move(all);
}

StateDict ZeroRedundancyOptimizer::state() const {
  if (impl_->consolidated) return *impl_->consolidated;
  const std::string rank = std::to_string(impl_->group.rank());
  throw UsageError(std::string(kWhat) + ", rank " + rank +
                       ": the state is spread over the ranks and was not collected on this one",
                   "call consolidate_state_dict(" + rank + ") on all ranks before");
}

void ZeroRedundancyOptimizer::load_state(const StateDict& state) {
  size_t first = 0, taken = 0;
  std::vector<StateDict> parts;
  for (const auto& group : impl_->groups) {
    const size_t count = group->shards().parameters().size();
    taken += parts.emplace_back(renumbered(state, first, count, 0)).size();
    first += count;
  }
  if (taken != state.size())
    throw CheckpointError(name() + ": the optimizer state has entries for parameters that do not " +
                              "exist; there are " + std::to_string(first),
                          "the checkpoint is of another model or optimizer");
  for (size_t i = 0; i < parts.size(); ++i) impl_->groups[i]->load_state(parts[i]);
}

int64_t ZeroRedundancyOptimizer::state_bytes() const {
  int64_t bytes = 0;
  for (const auto& group : impl_->groups) bytes += detail::bytes_of(group->local().state());
  return bytes;
}

}  // namespace lockstep
