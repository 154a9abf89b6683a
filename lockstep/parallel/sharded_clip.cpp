#include "lockstep/parallel/sharded_clip.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <limits>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lockstep/base/error.h"
#include "lockstep/optim/flat_runs.h"

namespace lockstep {
namespace {

void check(const std::vector<at::Tensor>& gradients, const ClipOptions& options) {
  if (!(options.norm_type >= 1)) {
    throw UsageError("clip_grad_norm: norm_type is " + std::to_string(options.norm_type) +
                     ", expected 1 or more, or infinity");
  }
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined() || gradient.layout() != at::kStrided ||
        !at::isFloatingType(gradient.scalar_type()))
      throw UsageError("clip_grad_norm: a gradient is " +
                       (gradient.defined() ? gradient.toString() : std::string("undefined")) +
                       ", expected dense ones of floating-point numbers");
  }
}

/// One number where the group communicates: the sum of this rank's norms to the power of the norm's
/// type, or the largest of them.
at::Tensor local_norm(const std::vector<at::Tensor>& gradients, double type,
                      const ProcessGroup& group) {
  const auto device = group.native().getBoundDeviceId().value_or(c10::Device(c10::kCPU));
  std::vector<at::Tensor> norms;
  for (const at::Tensor& gradient : gradients) {
    if (gradient.numel() == 0) continue;
    // A norm of float16 gradients need not fit into float16, least of all with a loss scale.
    const auto dtype =
        gradient.scalar_type() == at::kHalf ? std::optional(at::kFloat) : std::nullopt;
    const at::Tensor norm = at::linalg_vector_norm(gradient, type, {}, /*keepdim=*/false, dtype);
    norms.push_back(norm.to(device, at::kDouble));
  }
  if (norms.empty()) return at::zeros({1}, at::dtype(at::kDouble).device(device));
  const at::Tensor all = at::stack(norms);
  return (std::isinf(type) ? all.max() : all.pow(type).sum()).reshape({1});
}

/// The largest of all ranks' numbers, or NaN where one of them is: Gloo's maximum may pass it over.
void reduce_largest(at::Tensor& number, const ProcessGroup& group) {
  const at::Tensor is_nan = number.isnan();
  at::Tensor both = at::cat({number.masked_fill(is_nan, 0), is_nan.to(at::kDouble)});
  group.all_reduce(both, ReduceOp::max);
  number = both.narrow(0, 0, 1).masked_fill(both.narrow(0, 1, 1).gt(0),
                                            std::numeric_limits<double>::quiet_NaN());
}

}  // namespace

double clip_grad_norm(const std::vector<at::Tensor>& gradients, double max_norm,
                      const ProcessGroup& group, const ClipOptions& options) {
  const c10::AutoGradMode no_grad(false);
  check(gradients, options);
  const bool largest = std::isinf(options.norm_type);
  at::Tensor total = local_norm(gradients, options.norm_type, group);
  if (group.size() > 1) largest ? reduce_largest(total, group) : group.all_reduce(total);
  const double sum = total.item<double>();
  const double norm = largest ? sum : std::pow(sum, 1 / options.norm_type);
  if (options.error_if_nonfinite && !std::isfinite(norm)) {
    throw NumericError("clip_grad_norm, rank " + std::to_string(group.rank()) +
                           ": the norm of all ranks' gradients is " + std::to_string(norm),
                       "skip the step, or look for what overflows (lr, loss scale, data)");
  }
  const double factor = max_norm / (norm + 1e-6);
  // As in Python: NaN is not above 1, so it is multiplied in.
  if (factor >= 1) return norm;
  for (const at::Tensor& run : flat_runs(gradients)) run.mul_(factor);
  return norm;
}

}  // namespace lockstep
