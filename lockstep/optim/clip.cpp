#include "lockstep/optim/clip.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <mutex>
#include <optional>
#include <string>

#include "lockstep/base/log.h"
#include "lockstep/optim/dense_layout.h"
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

void tell_of_no_gradient(size_t parameters) {
  log_warning("clip_grad_norm: none of the " + std::to_string(parameters) +
              " parameters has a gradient. Under zero2 and fsdp the gradients lie in shards: call "
              "the strategy's clip_grad_norm");
}

std::vector<at::Tensor> chosen(const std::vector<at::Tensor>& tensors,
                               const std::vector<size_t>& places) {
  std::vector<at::Tensor> some;
  for (const size_t place : places) some.push_back(tensors[place]);
  return some;
}

}  // namespace

std::vector<at::Tensor> detail::gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) continue;
    // Values of one index that are still apart may only overflow when they are added up.
    const bool apart = gradient.is_sparse() && !gradient.is_coalesced();
    if (apart && gradient.scalar_type() == at::kHalf) gradient = gradient.coalesce();
    gradients.push_back(gradient);
  }
  return gradients;
}

double detail::clip_gradients(const std::vector<at::Tensor>& gradients, double max_norm,
                              const TotalNorm& total_norm) {
  const c10::AutoGradMode no_grad(false);
  const auto kinds = by_kind(gradients);
  std::vector<at::Tensor> norms;
  std::vector<size_t> places;
  for (const auto& kind : kinds) {
    // A norm of float16 gradients need not fit into float16.
    const bool half = gradients[kind.front()].scalar_type() == at::kHalf;
    const auto dtype = half ? std::optional<at::ScalarType>(at::kFloat) : std::nullopt;
    for (const at::Tensor& norm : at::_foreach_norm(chosen(gradients, kind), 2.0, dtype))
      norms.push_back(norm.to(gradients.front().device()));
    places.insert(places.end(), kind.begin(), kind.end());
  }
  const at::Tensor total = total_norm(norms, places);
  // Python's `max_norm / tensor` is a reciprocal and a product; so it is here, for the same bits.
  const at::Tensor factor = (total + 1e-6).reciprocal().mul(max_norm).clamp_max(1.0);
  const double norm = total.item<double>();
  // A product by 1 changes no bit. (Asking a CUDA device again would wait for it.)
  if (total.is_cpu() && factor.item<double>() == 1) return norm;
  for (const auto& kind : kinds)
    at::_foreach_mul_(flat_runs(chosen(gradients, kind)),
                      factor.to(gradients[kind.front()].device()));
  return norm;
}

double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm) {
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : unique_parameters(parameters)) {
    at::Tensor gradient = numbers_of(parameter);
    if (gradient.defined()) gradients.push_back(std::move(gradient));
  }
  if (gradients.empty()) {
    static std::once_flag told;  // Not in each step.
    if (!parameters.empty()) std::call_once(told, tell_of_no_gradient, parameters.size());
    return 0;
  }
  return detail::clip_gradients(gradients, max_norm, [](const auto& norms, const auto&) {
    return at::linalg_vector_norm(at::stack(norms), 2.0);
  });
}

}  // namespace lockstep
