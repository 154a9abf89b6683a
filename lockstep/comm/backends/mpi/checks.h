#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

/// What callers may pass; each throws UsageError naming the operation.
namespace lockstep::mpi {

/// A dense tensor of the CPU.
void check_dense(const char* operation, const at::Tensor& tensor);
/// One such tensor.
const at::Tensor& only(const char* operation, const std::vector<at::Tensor>& tensors);
/// One list of such tensors, one a rank.
const std::vector<at::Tensor>& only_list(const char* operation,
                                         const std::vector<std::vector<at::Tensor>>& lists,
                                         int size);
/// Others of one's shape and dtype.
void expect_alike(const char* operation, const at::Tensor& one,
                  const std::vector<at::Tensor>& others);
void expect_multiple(const char* operation, const at::Tensor& large, const at::Tensor& small,
                     int size);
void check_root(const char* operation, int64_t root, int size);
void check_peer(const char* operation, int peer, int size);

/// One sparse tensor, to be summed or averaged.
void check_sparse(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op);
/// The sum of all ranks' sparse tensors, in the order of the ranks. They hold different numbers of
/// elements: all gather how many, then indices and values padded to the most. `gather_all` returns
/// what all ranks gave, stacked.
at::Tensor sparse_sum(const at::Tensor& mine, int size,
                      const std::function<at::Tensor(at::Tensor)>& gather_all);

}  // namespace lockstep::mpi
