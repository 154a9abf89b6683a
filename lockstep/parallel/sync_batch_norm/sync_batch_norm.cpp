#include "lockstep/parallel/sync_batch_norm/sync_batch_norm.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "lockstep/autograd/recorded_state.h"
#include "lockstep/base/error.h"
#include "lockstep/parallel/sync_batch_norm/sync_statistics.h"

namespace lockstep {
namespace {

/// A mode of LibTorch's dispatcher that nobody else uses: it is there for tests of the dispatcher.
/// Every call on this thread comes by while it is on, before autograd and autocast.
constexpr auto kMode = c10::DispatchKey::TESTING_ONLY_GenericMode;

/// The innermost guard's group on this thread. Threads that a guard's owner starts have none, and
/// so run plain batch norms.
thread_local const ProcessGroup* current_group = nullptr;

at::Tensor batch_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias,
                      const std::optional<at::Tensor>& running_mean,
                      const std::optional<at::Tensor>& running_var, bool training, double momentum,
                      double eps, bool cudnn_enabled) {
  const c10::impl::ExcludeDispatchKeyGuard plain(kMode);
  if (!training || current_group == nullptr) {
    return at::batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps,
                          cudnn_enabled);
  }
  const auto tensor = [](const std::optional<at::Tensor>& value) {
    return value.value_or(at::Tensor());
  };
  return detail::sync_batch_norm(input, tensor(weight), tensor(bias), tensor(running_mean),
                                 tensor(running_var), momentum, eps, *current_group);
}

/// As it is. LibTorch's calls at::batch_norm, with the samples' statistics as further channels.
at::Tensor instance_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                         const std::optional<at::Tensor>& bias,
                         const std::optional<at::Tensor>& running_mean,
                         const std::optional<at::Tensor>& running_var, bool use_input_stats,
                         double momentum, double eps, bool cudnn_enabled) {
  const c10::impl::ExcludeDispatchKeyGuard plain(kMode);
  return at::instance_norm(input, weight, bias, running_mean, running_var, use_input_stats,
                           momentum, eps, cudnn_enabled);
}

/// Tells LibTorch's dispatcher, once in a process. It cannot be told of one thread only.
void register_mode() {
  static const auto fall_through = [] {
    torch::Library all(torch::Library::IMPL, "_", kMode, __FILE__, __LINE__);
    all.fallback(torch::CppFunction::makeFallthrough());
    torch::Library aten(torch::Library::IMPL, "aten", kMode, __FILE__, __LINE__);
    aten.impl("batch_norm", TORCH_FN(batch_norm));
    aten.impl("instance_norm", TORCH_FN(instance_norm));
    return std::make_pair(std::move(all), std::move(aten));
  }();
}

}  // namespace

struct SyncBatchNormGuard::Impl {
  explicit Impl(ProcessGroup g)
      : group(std::move(g)),
        before(current_group),
        for_checkpoints([again = group] { return std::make_shared<SyncBatchNormGuard>(again); }) {}
  ProcessGroup group;
  const ProcessGroup* before;
  c10::impl::IncludeDispatchKeyGuard mode{kMode};
  RecordedGuard for_checkpoints;  ///< Activations are made anew with the same batch norms.
};

SyncBatchNormGuard::SyncBatchNormGuard(ProcessGroup group) {
  if (!group || group.size() < 2) return;
  register_mode();
  impl_ = std::make_unique<Impl>(std::move(group));
  current_group = &impl_->group;
}

SyncBatchNormGuard::~SyncBatchNormGuard() {
  if (impl_) current_group = impl_->before;
}

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  if (input.dim() < 2 || input.size(1) != options.num_features()) {
    throw UsageError("SyncBatchNorm: the input has shape " + c10::str(input.sizes()) +
                     ", expected [N, " + std::to_string(options.num_features()) + ", ...]");
  }
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  _check_input_dim(input);
  if (!is_training() || !group_ || group_.size() < 2) return Base::forward(input);
  double factor = options.momentum().value_or(0);
  if (options.track_running_stats()) {
    num_batches_tracked += 1;
    if (!options.momentum()) factor = 1.0 / num_batches_tracked.item<double>();
  }
  return detail::sync_batch_norm(input, weight, bias, running_mean, running_var, factor,
                                 options.eps(), group_);
}

}  // namespace lockstep
