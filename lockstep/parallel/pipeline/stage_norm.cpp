#include "lockstep/parallel/pipeline/stage_norm.h"

#include <ATen/Functions.h>

#include <optional>
#include <vector>

#include "lockstep/optim/clip.h"
#include "lockstep/optim/optim.h"

namespace lockstep::detail {
namespace {

/// In which norms are added up. A norm of float16 gradients need not fit into float16.
at::ScalarType norm_dtype(const StageTensors& tensors) {
  std::optional<at::ScalarType> widest;
  for (const StageTensor& parameter : tensors.parameters()) {
    if (!parameter.tensor.requires_grad()) continue;
    const at::ScalarType own = parameter.tensor.scalar_type();
    const at::ScalarType dtype = own == at::kHalf ? at::kFloat : own;
    widest = widest ? c10::promoteTypes(*widest, dtype) : dtype;
  }
  return widest.value_or(at::kFloat);
}

}  // namespace

double clip_stage_gradients(const StageTensors& tensors, const ProcessGroup& pipeline,
                            c10::Device device, double max_norm) {
  if (pipeline.size() == 1) return clip_grad_norm(tensors.own_parameters(), max_norm);
  constexpr int64_t kCountedElsewhere = -1;
  std::vector<at::Tensor> gradients;
  std::vector<int64_t> numbers;
  for (const size_t i : tensors.own()) {
    const StageTensor& parameter = tensors.parameters()[i];
    if (!parameter.tensor.grad().defined()) continue;
    gradients.push_back(parameter.tensor.grad());
    const bool is_owner = parameter.owner() == pipeline.rank();
    numbers.push_back(is_owner ? static_cast<int64_t>(i) : kCountedElsewhere);
  }
  // Each rank puts its own norms into a table of zeros, and a sum over the ranks, which changes no
  // bit, puts them together. Row 0: the norms. Row 1: whether there is one.
  return clip_gradients(gradients, max_norm, [&](const auto& norms, const auto& places) {
    const auto count = static_cast<int64_t>(tensors.parameters().size());
    at::Tensor table = at::zeros({2, count}, at::TensorOptions(device).dtype(at::kDouble));
    for (size_t i = 0; i < norms.size(); ++i) {
      const int64_t number = numbers[places[i]];
      if (number == kCountedElsewhere) continue;
      table[0][number].copy_(norms[i]);
      table[1][number].fill_(1);
    }
    pipeline.all_reduce(table);
    const at::Tensor all = table[0].masked_select(table[1].gt(0)).to(norm_dtype(tensors));
    return at::linalg_vector_norm(all, 2.0);
  });
}

}  // namespace lockstep::detail
