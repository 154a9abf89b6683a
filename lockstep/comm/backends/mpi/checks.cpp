#include "lockstep/comm/backends/mpi/checks.h"

#include <ATen/ATen.h>

#include "lockstep/base/error.h"
#include "lockstep/comm/call_signature.h"

namespace lockstep::mpi {

using Tensors = std::vector<at::Tensor>;

void check_dense(const char* operation, const at::Tensor& tensor) {
  if (!tensor.is_cpu())
    throw UsageError(std::string(operation) + ": a tensor on " + tensor.device().str() +
                         "; the backend mpi joins CPU tensors",
                     "use --backend nccl for CUDA tensors, or gloo");
  if (tensor.layout() != at::kStrided)
    throw UsageError(std::string(operation) + ": the tensor is not dense",
                     "all_reduce takes sparse tensors; for the others use tensor.to_dense()");
}

const at::Tensor& only(const char* operation, const Tensors& tensors) {
  if (tensors.size() != 1)
    throw UsageError(std::string(operation) + ": " + std::to_string(tensors.size()) +
                     " tensors, expected one");
  check_dense(operation, tensors[0]);
  return tensors[0];
}

const Tensors& only_list(const char* operation, const std::vector<Tensors>& lists, int size) {
  if (lists.size() != 1 || lists[0].size() != static_cast<size_t>(size))
    throw UsageError(std::string(operation) + ": expected one list of " + std::to_string(size) +
                     " tensors, one a rank");
  for (const auto& tensor : lists[0]) check_dense(operation, tensor);
  return lists[0];
}

void expect_alike(const char* operation, const at::Tensor& one, const Tensors& others) {
  for (const auto& other : others) {
    if (other.sizes() == one.sizes() && other.scalar_type() == one.scalar_type()) continue;
    throw UsageError(std::string(operation) + ": a rank's tensor is " +
                     describe(signature_of(one)) + ", the list holds " +
                     describe(signature_of(other)));
  }
}

void expect_multiple(const char* operation, const at::Tensor& large, const at::Tensor& small,
                     int size) {
  if (large.scalar_type() == small.scalar_type() && large.numel() == small.numel() * size) return;
  throw UsageError(std::string(operation) + ": " + describe(signature_of(large)) + " is not " +
                   std::to_string(size) + " times " + describe(signature_of(small)));
}

void check_root(const char* operation, int64_t root, int size) {
  if (root >= 0 && root < size) return;
  throw UsageError(std::string(operation) + ": root " + std::to_string(root) +
                   " is out of range; the group has ranks 0 to " + std::to_string(size - 1));
}

void check_peer(const char* operation, int peer, int size) {
  if (peer >= 0 && peer < size) return;
  throw UsageError(std::string(operation) + ": rank " + std::to_string(peer) +
                   " is out of range; the group has ranks 0 to " + std::to_string(size - 1));
}

void check_sparse(const Tensors& tensors, const c10d::ReduceOp& op) {
  if (tensors.size() != 1 || !tensors[0].is_sparse() || !tensors[0].is_cpu())
    throw UsageError("all_reduce of sparse tensors: expected one sparse tensor of the CPU");
  if (op.op_ != c10d::ReduceOp::SUM && op.op_ != c10d::ReduceOp::AVG)
    throw UsageError("all_reduce of sparse tensors: they are summed or averaged only");
}

at::Tensor sparse_sum(const at::Tensor& tensor, int size,
                      const std::function<at::Tensor(at::Tensor)>& gather_all) {
  const at::Tensor mine = tensor.coalesce();
  const at::Tensor counts = gather_all(at::full({1}, mine._nnz(), at::kLong));
  const int64_t most = counts.max().item<int64_t>();
  const auto padded = [&](const at::Tensor& values, int64_t dim) {
    std::vector<int64_t> shape = values.sizes().vec();
    shape[static_cast<size_t>(dim)] = most;
    at::Tensor result = at::zeros(shape, values.options());
    result.narrow(dim, 0, mine._nnz()).copy_(values);
    return result;
  };
  const at::Tensor indices = gather_all(padded(mine.indices(), 1));
  const at::Tensor values = gather_all(padded(mine.values(), 0));
  at::Tensor sum;
  for (int rank = 0; rank < size; ++rank) {
    const int64_t count = counts[rank].item<int64_t>();
    const at::Tensor one =
        at::sparse_coo_tensor(indices[rank].narrow(1, 0, count), values[rank].narrow(0, 0, count),
                              mine.sizes(), mine.options());
    sum = rank == 0 ? one : sum + one;
  }
  return sum;
}

}  // namespace lockstep::mpi
