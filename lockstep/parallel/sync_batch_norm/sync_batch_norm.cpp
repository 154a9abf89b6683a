#include "lockstep/parallel/sync_batch_norm/sync_batch_norm.h"

#include <ATen/Functions.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/autograd/recorded_state.h"
#include "lockstep/base/error.h"

namespace lockstep::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// All dimensions but the channels'.
std::vector<int64_t> other_dims(const at::Tensor& x) {
  std::vector<int64_t> dims{0};
  for (int64_t d = 2; d < x.dim(); ++d) dims.push_back(d);
  return dims;
}

/// A vector of channels that spreads over a tensor like `x`.
at::Tensor per_channel(const at::Tensor& values, const at::Tensor& x) {
  std::vector<int64_t> shape(static_cast<size_t>(x.dim()), 1);
  shape[1] = values.numel();
  return values.to(x.scalar_type()).view(shape);
}

struct Moments {
  at::Tensor mean;      ///< [C], double.
  at::Tensor variance;  ///< [C], double: biased.
  double count = 0;     ///< Values per channel, of all ranks.
};

at::Tensor in_float(const at::Tensor& x) {
  return c10::isReducedFloatingType(x.scalar_type()) ? x.to(at::kFloat) : x;
}

/// Means, summed squared differences from them, and the count, as [2C + 1] doubles.
at::Tensor own_sums(const at::Tensor& x) {
  const int64_t channels = x.size(1);
  const int64_t samples = x.numel() / channels;
  const auto count = static_cast<double>(samples);
  if (count == 0) return at::zeros({2 * channels + 1}, x.options().dtype(at::kDouble));
  auto [variance, mean] = at::var_mean(in_float(x), other_dims(x), /*unbiased=*/false);
  return at::cat({mean.to(at::kDouble), variance.to(at::kDouble).mul_(count),
                  at::full({1}, count, mean.options().dtype(at::kDouble))});
}

/// Chan's formula for moments of parts, rank after rank.
Moments joined_moments(const at::Tensor& x, const ProcessGroup& group) {
  const int64_t channels = x.size(1);
  const at::Tensor own = own_sums(x);
  at::Tensor all = at::empty({group.size() * own.numel()}, own.options());
  group.all_gather_into_tensor(all, own);
  all = all.view({group.size(), own.numel()});
  const at::Tensor counts = all.select(1, 2 * channels), means = all.narrow(1, 0, channels);
  Moments moments;
  moments.count = counts.sum().item<double>();
  if (moments.count <= 1) {
    throw UsageError("SyncBatchNorm: expected more than 1 value per channel when training, got " +
                         std::to_string(static_cast<int64_t>(moments.count)) + " over all ranks",
                     "give larger batches, or use the module in evaluation mode");
  }
  moments.mean = at::mv(means.t(), counts).div_(moments.count);
  const at::Tensor squares = all.narrow(1, channels, channels).sum(0) +
                             (means - moments.mean).square_().mul_(counts.unsqueeze(1)).sum(0);
  moments.variance = squares.div_(moments.count);
  return moments;
}

void update_running(const std::optional<at::Tensor>& running, const at::Tensor& value,
                    double momentum) {
  if (!running || !running->defined()) return;
  running->mul_(1 - momentum).add_(value.to(running->scalar_type()), momentum);
}

class SyncBatchNormFunction : public torch::autograd::Function<SyncBatchNormFunction> {
 public:
  struct Holder : torch::CustomClassHolder {
    explicit Holder(ProcessGroup g) : group(std::move(g)) {}
    ProcessGroup group;
  };

  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias, const at::Tensor& mean,
                            const at::Tensor& variance, double count, double eps,
                            const ProcessGroup& group) {
    context->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(group));
    context->saved_data["count"] = count;
    context->saved_data["eps"] = eps;
    context->save_for_backward({x, weight.value_or(at::Tensor()), mean, variance});
    // Evaluation of these statistics: LibTorch's kernel for every memory format. Its weights are of
    // the statistics' type, which for an input of 16 bits is float32.
    const auto as_mean = [&mean](const std::optional<at::Tensor>& tensor) {
      return tensor && tensor->defined() ? std::optional(tensor->to(mean.scalar_type()))
                                         : std::nullopt;
    };
    return std::get<0>(at::native_batch_norm(x, as_mean(weight), as_mean(bias), mean, variance,
                                             /*training=*/false, /*momentum=*/0, eps));
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &mean = saved[2], &variance = saved[3];
    const at::Tensor& dy = gradients[0];
    const double count = context->saved_data["count"].toDouble();
    const double eps = context->saved_data["eps"].toDouble();
    const auto holder = context->saved_data["group"].toCapsule();
    const auto& group = static_cast<const Holder&>(*holder).group;
    const int64_t channels = x.size(1);
    const at::Tensor deviation = variance.to(at::kDouble).add(eps).rsqrt();

    // [2, C] doubles: the sums of dy, and of dy times the normalised x.
    at::Tensor sums = at::zeros({2, channels}, mean.options().dtype(at::kDouble));
    if (x.numel() > 0) {
      const at::Tensor centered = in_float(x) - per_channel(mean, in_float(x));
      sums[0].copy_(in_float(dy).sum(other_dims(x)));
      sums[1].copy_((in_float(dy) * centered).sum(other_dims(x)).to(at::kDouble) * deviation);
    }
    variable_list results(8);
    if (weight.defined()) {
      results[1] = sums[1].to(weight.scalar_type());
      results[2] = sums[0].to(weight.scalar_type());
    }
    if (!context->needs_input_grad(0)) return results;

    at::Tensor all = sums.clone();
    group.all_reduce(all);
    all.div_(count);
    // scale * (dy - mean(dy) - normalised x * mean(dy * normalised x))
    const at::Tensor scale = weight.defined() ? deviation * weight.to(at::kDouble) : deviation;
    const at::Tensor slope = scale * deviation * all[1];
    const at::Tensor offset = slope * mean.to(at::kDouble) - scale * all[0];
    at::Tensor dx = in_float(dy) * per_channel(scale, in_float(dy));
    dx.sub_(in_float(x) * per_channel(slope, in_float(x))).add_(per_channel(offset, dx));
    results[0] = dx.to(x.scalar_type());
    return results;
  }
};

/// Batch norm in training with the mean and variance of all ranks' batches: what at::batch_norm is
/// for one. `x` is [N, C, ...], of any memory format; N may differ between ranks, and be 0. The
/// other tensors are [C] and may be undefined. Updates the running statistics, with the unbiased
/// variance. The sums are made in double, in the ranks' order, to the same bits on all ranks.
/// Backward is a collective too. Gradients of `weight` and `bias` are this rank's own parts, as
/// DistributedDataParallel expects them. Throws UsageError for one value per channel in all.
at::Tensor sync_batch_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                           const std::optional<at::Tensor>& bias,
                           const std::optional<at::Tensor>& running_mean,
                           const std::optional<at::Tensor>& running_var, double momentum,
                           double eps, const ProcessGroup& group) {
  at::Tensor mean, variance;
  double count = 0;
  {
    const at::NoGradGuard no_grad;
    const Moments moments = joined_moments(x.detach(), group);
    count = moments.count;
    update_running(running_mean, moments.mean, momentum);
    update_running(running_var, moments.variance * (count / (count - 1)), momentum);
    const auto type = in_float(x).scalar_type();
    mean = moments.mean.to(type);
    variance = moments.variance.to(type);
  }
  return SyncBatchNormFunction::apply(x, weight, bias, mean, variance, count, eps, group);
}

}  // namespace
}  // namespace lockstep::detail

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
  return detail::sync_batch_norm(input, weight, bias, running_mean, running_var, momentum, eps,
                                 *current_group);
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
