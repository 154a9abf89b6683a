#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep {

/// Replaces each parameter by its mean over the group's ranks, with one all-reduce of all of them
/// in one flat tensor. The names and bits of
/// torch.distributed.algorithms.model_averaging.utils.average_parameters: each rank divides by the
/// group's size first. Needs memory for one more copy of the parameters. Parameters of several
/// dtypes are averaged in the widest. The parameters keep their memory. A collective; on a rank
/// that is not in the group (a null handle) nothing happens.
void average_parameters(const std::vector<at::Tensor>& parameters, const ProcessGroup& group);

/// Those that have a gradient.
std::vector<at::Tensor> get_params_to_average(const std::vector<at::Tensor>& parameters);

}  // namespace lockstep
