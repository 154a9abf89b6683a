#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "lockstep/comm/checks/observed_call.h"

namespace lockstep::backends {

/// Whether the elements lie in memory one after the other, as they read: contiguous, not lazily
/// conjugated or negated, no zeros without memory (at::_efficientzerotensor).
bool is_plain(const at::Tensor& tensor);
/// Such a copy of a dense tensor, made outside autograd; of `dtype` where one is given.
at::Tensor plain_copy(const at::Tensor& tensor, at::ScalarType dtype = at::ScalarType::Undefined);

// What callers may pass to a group. Each throws UsageError naming the operation.

/// A defined tensor; where it is dense, one that `is_plain`, unless the backend `takes_strided`.
void check_tensor(Operation operation, const at::Tensor& tensor, bool takes_strided);
/// A dense tensor of the CPU.
void check_dense(Operation operation, const at::Tensor& tensor);
/// One such tensor.
const at::Tensor& only(Operation operation, const std::vector<at::Tensor>& tensors);
/// One list of tensors, one per rank.
const std::vector<at::Tensor>& only_list(Operation operation,
                                         const std::vector<std::vector<at::Tensor>>& lists,
                                         int size);
/// Others of one's shape and dtype.
void expect_alike(Operation operation, const at::Tensor& one,
                  const std::vector<at::Tensor>& others);
/// Two tensors of one dtype, the first `size` times the second.
void expect_multiple(Operation operation, const at::Tensor& large, const at::Tensor& small,
                     int size);
/// Tensors of one dtype: outputs and inputs are, where a call has both.
void expect_one_dtype(Operation operation, at::TensorList some, at::TensorList others);
/// A result whose elements have memory and do not share it, as those of an expanded tensor do.
void expect_own_elements(Operation operation, const at::Tensor& output);
/// A reduction that the dtype has.
void check_reduction(at::ScalarType dtype, const c10d::ReduceOp& op);
/// As many `what` as expected.
void expect_count(Operation operation, const char* what, size_t count, size_t expected);
/// A rank of a group of `size`; `argument`: its name in the message.
void check_rank(std::string_view operation, const char* argument, int64_t rank, int size);
inline void check_rank(Operation operation, const char* argument, int64_t rank, int size) {
  check_rank(operation_name(operation), argument, rank, size);
}
/// How many rows of `tensor` belong to each rank: `splits`, or even parts where it is empty.
std::vector<int64_t> rows_of_ranks(Operation operation, const char* argument,
                                   const at::Tensor& tensor, const std::vector<int64_t>& splits,
                                   int size);

}  // namespace lockstep::backends
