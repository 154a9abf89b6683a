#include "lockstep/parallel/ddp.h"

#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/parallel/gradient_reducer.h"
#include "lockstep/parallel/module_state.h"

namespace lockstep::detail {
namespace {

bool changes_bits(const DdpOptions& options) {
  return options.custom_hook || options.async_custom_hook ||
         options.comm_hook == CommHook::fp16_compress ||
         options.comm_hook == CommHook::bf16_compress;
}

}  // namespace

std::unique_ptr<GradientReducer> make_gradient_reducer(
    const std::vector<ReducedParameter>& parameters, const ProcessGroup& group,
    const DdpOptions& options) {
  if (options.reducer == Reducer::c10d) return make_c10d_reducer(parameters, group, options);
  const std::string reason = why_not_own(parameters, options);
  if (reason.empty()) return make_bucket_reducer(parameters, group, options);
  if (options.reducer == Reducer::automatic) return make_c10d_reducer(parameters, group, options);
  throw UsageError("DistributedDataParallel: Reducer::lockstep has no " + reason,
                   "leave DdpOptions::reducer at Reducer::automatic");
}

void throw_unfinished(int rank, const std::vector<std::string>& names) {
  throw UsageError(
      "DistributedDataParallel, rank " + std::to_string(rank) +
          ": the last backward gave no gradient to " +
          (names.empty() ? "some parameters" : "these parameters: " + join(names, ", ")),
      "set DdpOptions::find_unused_parameters (or static_graph, when they are the "
      "same in every step), or make the loss depend on every output of forward");
}

class DdpCore::Impl {
 public:
  Impl(const ModuleState& state, const ProcessGroup& group, const DdpOptions& options) {
    if (options.broadcast_buffers) {
      for (const NamedTensor& item : state.buffers) buffers_.push_back(item.tensor);
    }
    if (options.init_sync) {
      check_same_state(state, group);
      std::vector<at::Tensor> tensors;
      for (const NamedTensor& item : state.parameters) tensors.push_back(item.tensor.detach());
      tensors.insert(tensors.end(), buffers_.begin(), buffers_.end());
      broadcast_tensors(tensors, group);
    }
    reducer_ = make_gradient_reducer(state.reduced, group, options);
  }

  void before_forward(const ProcessGroup& group, bool synchronizing) {
    if (c10::GradMode::is_enabled()) reducer_->before_forward(synchronizing);
    if (sync_buffers_) broadcast_tensors(buffers_, group);
  }

  bool wants_outputs() const { return reducer_->wants_outputs(); }

  void after_forward(std::vector<at::Tensor>& outputs, bool synchronizing) {
    const bool will_reduce = synchronizing && c10::GradMode::is_enabled();
    // After a forward whose gradients stay local the buffers stay local too, as in Python.
    sync_buffers_ = will_reduce;
    reducer_->before_backward(outputs, will_reduce);
  }

  void fill(DdpStatistics& statistics) const { reducer_->fill(statistics); }

 private:
  bool sync_buffers_ = true;
  std::vector<at::Tensor> buffers_;
  std::unique_ptr<GradientReducer> reducer_;
};

DdpCore::DdpCore(torch::nn::Module& module, ProcessGroup group, const DdpOptions& options)
    : group_(std::move(group)) {
  if (!group_) {
    throw UsageError("DistributedDataParallel: the process group is null",
                     "ranks that are not in a group must not wrap a module with it");
  }
  ModuleState state = find_module_state(module, options.ignored);
  for (const ReducedParameter& parameter : state.reduced) elements_ += parameter.tensor.numel();
  active_ = group_.size() > 1 || changes_bits(options);
  if (active_) impl_ = std::make_unique<Impl>(std::move(state), group_, options);
}

DdpCore::~DdpCore() = default;

void DdpCore::before_forward() {
  count_forward();
  impl_->before_forward(group_, synchronizing_);
}

bool DdpCore::wants_outputs() const {
  return impl_->wants_outputs();
}

void DdpCore::after_forward(std::vector<at::Tensor>& outputs) {
  impl_->after_forward(outputs, synchronizing_);
}

DdpStatistics DdpCore::statistics() const {
  DdpStatistics statistics;
  statistics.iterations = iterations_;
  statistics.parameters = elements_;
  if (impl_) impl_->fill(statistics);
  return statistics;
}

}  // namespace lockstep::detail
