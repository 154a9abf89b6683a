#include "lockstep/comm/backends/tensor_checks.h"

#include <ATen/ATen.h>

#include "lockstep/base/error.h"
#include "lockstep/comm/checks/call_signature.h"

namespace lockstep::backends {

using Tensors = std::vector<at::Tensor>;

void check_dense(const char* operation, const at::Tensor& tensor) {
  if (!tensor.is_cpu())
    throw UsageError(std::string(operation) + ": a tensor on " + tensor.device().str() +
                         "; this group's backend joins CPU tensors",
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
  check_dense(operation, large);
  check_dense(operation, small);
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

}  // namespace lockstep::backends
