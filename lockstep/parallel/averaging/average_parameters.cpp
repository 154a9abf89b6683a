#include "lockstep/parallel/averaging/averagers.h"

#include <ATen/ops/cat.h>
#include <c10/core/GradMode.h>

namespace lockstep {

void average_parameters(const std::vector<at::Tensor>& parameters, const ProcessGroup& group) {
  if (!group || parameters.empty()) return;
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> flat;
  flat.reserve(parameters.size());
  for (const at::Tensor& parameter : parameters) flat.push_back(parameter.reshape({-1}));
  at::Tensor all = at::cat(flat);
  all.div_(group.size());
  group.all_reduce(all);
  int64_t offset = 0;
  for (const at::Tensor& parameter : parameters) {
    parameter.copy_(all.narrow(0, offset, parameter.numel()).view(parameter.sizes()));
    offset += parameter.numel();
  }
}

std::vector<at::Tensor> get_params_to_average(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> wanted;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined()) wanted.push_back(parameter);
  }
  return wanted;
}

}  // namespace lockstep
