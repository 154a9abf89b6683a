#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "lockstep/comm/checks/call_signature.h"

namespace lockstep::gloo {

/// The same memory as elements that Gloo moves: it knows nine dtypes only.
at::Tensor movable(const at::Tensor& tensor);
std::vector<at::Tensor> movable(const std::vector<at::Tensor>& tensors);
std::vector<std::vector<at::Tensor>> movable(const std::vector<std::vector<at::Tensor>>& lists);

/// The reduction by which Gloo does what was asked for: of bool a sum is "or" and a product "and",
/// as with the other backends. Throws UsageError for what Gloo does not have of this dtype.
/// `rank`: this one's number in the default group.
c10d::ReduceOp reduction_of(int rank, Operation operation, const c10d::ReduceOp& op,
                            const at::Tensor& tensor);

}  // namespace lockstep::gloo
