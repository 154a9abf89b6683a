#include "lockstep/parallel/pipeline/stage_norm.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <optional>
#include <vector>

#include "lockstep/optim/flat_runs.h"
#include "lockstep/optim/optim.h"

namespace lockstep::detail {
namespace {

/// A norm of float16 gradients need not fit into float16, least of all with a loss scale.
at::ScalarType norm_dtype(at::ScalarType gradient) {
  return gradient == at::kHalf ? at::kFloat : gradient;
}

std::vector<at::Tensor> norms_of(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> norms(gradients.size());
  for (const bool half : {false, true}) {
    std::vector<at::Tensor> some;
    std::vector<size_t> places;
    for (size_t i = 0; i < gradients.size(); ++i) {
      if ((gradients[i].scalar_type() == at::kHalf) != half) continue;
      some.push_back(gradients[i]);
      places.push_back(i);
    }
    if (some.empty()) continue;
    const auto found =
        at::_foreach_norm(some, 2.0, half ? std::optional(at::kFloat) : std::nullopt);
    for (size_t i = 0; i < found.size(); ++i) norms[places[i]] = found[i];
  }
  return norms;
}

/// The norms of all gradients of the model. Each rank puts its own into a table of zeros, and a sum
/// over the ranks, which changes no bit, puts them together. A tied parameter is counted once.
at::Tensor norms_of_all(const StageTensors& tensors, const ProcessGroup& pipeline,
                        c10::Device device) {
  const auto count = static_cast<int64_t>(tensors.parameters().size());
  std::vector<at::Tensor> gradients;
  std::vector<int64_t> numbers;
  for (const size_t i : tensors.own()) {
    const StageTensor& parameter = tensors.parameters()[i];
    if (parameter.owner() != pipeline.rank() || !parameter.tensor.grad().defined()) continue;
    gradients.push_back(parameter.tensor.grad());
    numbers.push_back(static_cast<int64_t>(i));
  }
  // Row 0: the norms. Row 1: whether there is one.
  at::Tensor table = at::zeros({2, count}, at::TensorOptions(device).dtype(at::kDouble));
  if (!gradients.empty()) {
    const auto norms = norms_of(gradients);
    for (size_t i = 0; i < norms.size(); ++i) {
      table[0][numbers[i]].copy_(norms[i]);
      table[1][numbers[i]].fill_(1);
    }
  }
  pipeline.all_reduce(table);
  return table;
}

/// Of all norms together.
at::ScalarType norm_dtype(const StageTensors& tensors) {
  std::optional<at::ScalarType> widest;
  for (const StageTensor& parameter : tensors.parameters()) {
    if (!parameter.tensor.requires_grad()) continue;
    const at::ScalarType dtype = norm_dtype(parameter.tensor.scalar_type());
    widest = widest ? c10::promoteTypes(*widest, dtype) : dtype;
  }
  return widest.value_or(at::kFloat);
}

}  // namespace

double clip_stage_gradients(const StageTensors& tensors, const ProcessGroup& pipeline,
                            c10::Device device, double max_norm) {
  const at::NoGradGuard no_grad;
  if (pipeline.size() == 1) return clip_grad_norm(tensors.own_parameters(), max_norm);
  const at::Tensor table = norms_of_all(tensors, pipeline, device);
  const at::Tensor norms = table[0].masked_select(table[1].gt(0)).to(norm_dtype(tensors));
  if (norms.numel() == 0) return 0;
  const at::Tensor total = at::linalg_vector_norm(norms, 2.0);
  const at::Tensor factor = (total + 1e-6).reciprocal().mul(max_norm).clamp_max(1.0);
  const double norm = total.item<double>();
  if (factor.item<double>() == 1) return norm;
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : tensors.own_parameters()) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  if (!gradients.empty()) at::_foreach_mul_(flat_runs(gradients), factor);
  return norm;
}

}  // namespace lockstep::detail
