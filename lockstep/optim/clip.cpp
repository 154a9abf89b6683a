#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/optim/flat_runs.h"
#include "lockstep/optim/optim.h"

namespace lockstep {
namespace {

/// What a norm is of. A sparse gradient gets each element once.
at::Tensor numbers_of(const at::Tensor& parameter) {
  at::Tensor& gradient = parameter.mutable_grad();
  if (!gradient.defined() || !gradient.is_sparse()) return gradient;
  gradient = gradient.coalesce();
  return gradient._values();
}

}  // namespace

double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm) {
  const c10::AutoGradMode no_grad(false);
  // One list a device and dtype, as LibTorch's list kernels want them.
  std::vector<std::vector<at::Tensor>> groups;
  for (const at::Tensor& parameter : unique_parameters(parameters)) {
    const at::Tensor gradient = numbers_of(parameter);
    if (!gradient.defined()) continue;
    auto group = groups.begin();
    while (group != groups.end() && (group->front().dtype() != gradient.dtype() ||
                                     group->front().device() != gradient.device())) {
      ++group;
    }
    if (group == groups.end()) group = groups.emplace(groups.end());
    group->push_back(gradient);
  }
  if (groups.empty()) return 0;
  const c10::Device first = groups.front().front().device();
  std::vector<at::Tensor> norms;
  for (const auto& group : groups) {
    // A norm of float16 gradients need not fit into float16.
    const bool half = group.front().scalar_type() == at::kHalf;
    const auto dtype = half ? std::optional<at::ScalarType>(at::kFloat) : std::nullopt;
    for (const at::Tensor& norm : at::_foreach_norm(group, 2.0, dtype)) {
      norms.push_back(norm.to(first));
    }
  }
  const at::Tensor total = at::linalg_vector_norm(at::stack(norms), 2.0);
  // Python's `max_norm / tensor` is a reciprocal and a product; so it is here, for the same bits.
  const at::Tensor factor = (total + 1e-6).reciprocal().mul(max_norm).clamp_max(1.0);
  const double norm = total.item<double>();
  // A product by 1 changes no bit. (Asking a CUDA device again would wait for it.)
  if (groups.size() == 1 && first.is_cpu() && factor.item<double>() == 1) return norm;
  for (const auto& group : groups) {
    at::_foreach_mul_(flat_runs(group), factor.to(group.front().device()));
  }
  return norm;
}

}  // namespace lockstep
