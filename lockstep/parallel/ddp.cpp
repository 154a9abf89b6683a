#include "lockstep/parallel/ddp.h"

#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include "lockstep/base/error.h"
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

struct DdpCore::Impl {
  ProcessGroup group;
  std::vector<at::Tensor> buffers;  ///< Those that are broadcast before a forward.
  int64_t elements = 0;             ///< That get a gradient.
  int64_t iterations = 0;
  bool synchronizing = true;
  bool sync_buffers = true;
  /// Null when there is nothing to do around forward: one rank and no hook that changes bits.
  std::unique_ptr<GradientReducer> reducer;

  void prepare(const ModuleState& state, const DdpOptions& options) {
    if (options.broadcast_buffers) {
      for (const NamedTensor& item : state.buffers) buffers.push_back(item.tensor);
    }
    if (options.init_sync) {
      check_same_state(state, group);
      std::vector<at::Tensor> tensors;
      for (const NamedTensor& item : state.parameters) tensors.push_back(item.tensor.detach());
      tensors.insert(tensors.end(), buffers.begin(), buffers.end());
      broadcast_tensors(tensors, group);
    }
    reducer = make_gradient_reducer(state.reduced, group, options);
  }
};

DdpCore::DdpCore(torch::nn::Module& module, ProcessGroup group, const DdpOptions& options)
    : impl_(std::make_unique<Impl>()) {
  if (!group) {
    throw UsageError("DistributedDataParallel: the process group is null",
                     "ranks that are not in a group must not wrap a module with it");
  }
  impl_->group = std::move(group);
  const ModuleState state = find_module_state(module, options.ignored);
  for (const ReducedParameter& parameter : state.reduced) {
    impl_->elements += parameter.tensor.numel();
  }
  if (impl_->group.size() > 1 || changes_bits(options)) impl_->prepare(state, options);
}

DdpCore::~DdpCore() = default;
DdpCore::DdpCore(DdpCore&&) noexcept = default;
DdpCore& DdpCore::operator=(DdpCore&&) noexcept = default;

void DdpCore::before_forward() {
  impl_->iterations += impl_->synchronizing ? 1 : 0;
  if (!impl_->reducer) return;
  if (c10::GradMode::is_enabled()) impl_->reducer->before_forward(impl_->synchronizing);
  if (impl_->sync_buffers) broadcast_tensors(impl_->buffers, impl_->group);
}

bool DdpCore::wants_outputs() const {
  return impl_->reducer && impl_->reducer->wants_outputs();
}

void DdpCore::after_forward(std::vector<at::Tensor>& outputs) {
  if (!impl_->reducer) return;
  const bool will_reduce = impl_->synchronizing && c10::GradMode::is_enabled();
  // After a forward whose gradients stay local the buffers stay local too, as in Python.
  impl_->sync_buffers = will_reduce;
  impl_->reducer->before_backward(outputs, will_reduce);
}

bool& DdpCore::synchronizing() {
  return impl_->synchronizing;
}

const ProcessGroup& DdpCore::group() const {
  return impl_->group;
}

DdpStatistics DdpCore::statistics() const {
  DdpStatistics statistics;
  statistics.iterations = impl_->iterations;
  statistics.parameters = impl_->elements;
  if (impl_->reducer) impl_->reducer->fill(statistics);
  return statistics;
}

}  // namespace lockstep::detail
