#include "lockstep/comm/backends/tensor_checks.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <numeric>

#include "lockstep/base/error.h"
#include "lockstep/comm/checks/call_signature.h"

namespace lockstep::backends {

using Tensors = std::vector<at::Tensor>;

namespace {

[[noreturn]] void refuse(Operation operation, const std::string& why,
                         const std::string& remedy = {}) {
  throw UsageError(std::string(operation_name(operation)) + ": " + why, remedy);
}

}  // namespace

bool is_plain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kLazy(
      {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  return tensor.is_contiguous() && !tensor.key_set().has_any(kLazy);
}

at::Tensor plain_copy(const at::Tensor& tensor, at::ScalarType dtype) {
  const at::AutoDispatchBelowADInplaceOrView outside_autograd;
  if (dtype == at::ScalarType::Undefined) dtype = tensor.scalar_type();
  // LibTorch 2.13 loses a lazy negation in a copy between float16 and float32.
  return at::empty(tensor.sizes(), tensor.options().dtype(dtype)).copy_(tensor.resolve_neg());
}

void check_tensor(Operation operation, const at::Tensor& tensor, bool takes_strided) {
  if (!tensor.defined()) refuse(operation, "an undefined tensor");
  if (tensor.layout() != at::kStrided || takes_strided || is_plain(tensor)) return;
  refuse(operation,
         tensor.is_contiguous() ? "the tensor is lazily conjugated or negated, or has no memory"
                                : "the tensor is not contiguous",
         "pass tensor.clone(at::MemoryFormat::Contiguous), and copy the result back where it is an "
         "output");
}

void check_dense(Operation operation, const at::Tensor& tensor) {
  if (!tensor.is_cpu())
    refuse(operation,
           "a tensor on " + tensor.device().str() + "; this group's backend joins CPU tensors",
           "use --backend nccl for CUDA tensors, or gloo");
  if (tensor.layout() != at::kStrided)
    refuse(operation, "the tensor is not dense",
           "all_reduce takes sparse tensors; for the others use tensor.to_dense()");
}

const at::Tensor& only(Operation operation, const Tensors& tensors) {
  if (tensors.size() != 1)
    refuse(operation, std::to_string(tensors.size()) + " tensors, expected one");
  check_dense(operation, tensors[0]);
  return tensors[0];
}

const Tensors& only_list(Operation operation, const std::vector<Tensors>& lists, int size) {
  if (lists.size() != 1 || lists[0].size() != static_cast<size_t>(size))
    refuse(operation, "expected one list of " + std::to_string(size) + " tensors, one a rank");
  return lists[0];
}

void expect_alike(Operation operation, const at::Tensor& one, const Tensors& others) {
  for (const auto& other : others) {
    if (other.sizes() == one.sizes() && other.scalar_type() == one.scalar_type()) continue;
    refuse(operation, "a rank's tensor is " + describe(signature_of(one)) + ", the list holds " +
                          describe(signature_of(other)));
  }
}

void expect_multiple(Operation operation, const at::Tensor& large, const at::Tensor& small,
                     int size) {
  if (large.scalar_type() == small.scalar_type() && large.numel() == small.numel() * size) return;
  refuse(operation, describe(signature_of(large)) + " is not " + std::to_string(size) + " times " +
                        describe(signature_of(small)));
}

void expect_one_dtype(Operation operation, at::TensorList some, at::TensorList others) {
  const at::Tensor* first = nullptr;
  for (const at::TensorList list : {some, others}) {
    for (const auto& tensor : list) {
      if (!first) first = &tensor;
      if (tensor.scalar_type() == first->scalar_type()) continue;
      refuse(operation, "tensors are " + describe(signature_of(*first)) + " and " +
                            describe(signature_of(tensor)) + ", expected one dtype");
    }
  }
}

void expect_own_elements(Operation operation, const at::Tensor& output) {
  if (at::has_internal_overlap(output) == at::MemOverlap::Yes)
    refuse(operation, "elements of the output share memory", "pass output.clone()");
  if (output._is_zerotensor()) refuse(operation, "the output has no memory", "pass output.clone()");
}

void check_reduction(at::ScalarType dtype, const c10d::ReduceOp& op) {
  using Op = c10d::ReduceOp;
  const auto kind = op.op_;
  if (kind > Op::BXOR)
    throw UsageError("the reduction premul_sum is NCCL's", "scale the tensor before and use sum");
  const bool bitwise = kind >= Op::BAND;
  const bool lacks = bitwise
                         ? !at::isIntegralType(dtype, /*includeBool=*/true)
                         : (kind == Op::AVG && dtype == at::kBool) ||
                               ((kind == Op::MIN || kind == Op::MAX) && at::isComplexType(dtype));
  if (!lacks) return;
  throw UsageError(std::string("a reduction that dtype ") + c10::toString(dtype) + " does not have",
                   bitwise ? "bitwise reductions are for integers and bool"
                           : "bool has no average, complex numbers have no order");
}

void expect_count(Operation operation, const char* what, size_t count, size_t expected) {
  if (count != expected)
    refuse(operation,
           std::to_string(count) + " " + what + ", expected " + std::to_string(expected));
}

void check_rank(std::string_view operation, const char* argument, int64_t rank, int size) {
  if (rank >= 0 && rank < size) return;
  throw UsageError(std::string(operation) + ": " + argument + "=" + std::to_string(rank) +
                   " is out of range; the group has ranks 0 to " + std::to_string(size - 1));
}

std::vector<int64_t> rows_of_ranks(Operation operation, const char* argument,
                                   const at::Tensor& tensor, const std::vector<int64_t>& splits,
                                   int size) {
  const auto ranks = static_cast<size_t>(size);
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const int64_t sum = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  const bool negative = std::any_of(splits.begin(), splits.end(), [](int64_t s) { return s < 0; });
  const bool even = splits.empty() && rows % size == 0;
  if (!even && (splits.size() != ranks || sum != rows || negative))
    refuse(operation, std::string(argument) + " do not cut " + std::to_string(rows) +
                          " rows into " + std::to_string(size) + " parts (" +
                          std::to_string(splits.size()) + " splits, sum " + std::to_string(sum) +
                          "; none for even parts)");
  return even ? std::vector<int64_t>(ranks, rows / size) : splits;
}

}  // namespace lockstep::backends
