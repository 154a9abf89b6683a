#include "lockstep/comm/backends/hierarchical/tensor_joining.h"

#include <ATen/ATen.h>

#include "lockstep/base/error.h"

namespace lockstep::hierarchical {
namespace {

shm::DataType data_type(at::ScalarType type) {
  using shm::DataType;
  switch (type) {
    case at::kByte:
      return DataType::u8;
    case at::kChar:
      return DataType::i8;
    case at::kShort:
      return DataType::i16;
    case at::kInt:
      return DataType::i32;
    case at::kLong:
      return DataType::i64;
    case at::kHalf:
      return DataType::f16;
    case at::kBFloat16:
      return DataType::bf16;
    case at::kFloat:
      return DataType::f32;
    case at::kDouble:
      return DataType::f64;
    case at::kBool:
      return DataType::boolean;
    case at::kComplexFloat:
      return DataType::c64;
    case at::kComplexDouble:
      return DataType::c128;
    default:
      throw UsageError(
          std::string("the backend hierarchical has no reductions of dtype ") + c10::toString(type),
          "convert the tensor first, for instance to float32");
  }
}

shm::Reduction reduction_kind(const c10d::ReduceOp& op) {
  using shm::Reduction;
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return Reduction::sum;
    case c10d::ReduceOp::AVG:
      return Reduction::avg;
    case c10d::ReduceOp::PRODUCT:
      return Reduction::product;
    case c10d::ReduceOp::MIN:
      return Reduction::min;
    case c10d::ReduceOp::MAX:
      return Reduction::max;
    case c10d::ReduceOp::BAND:
      return Reduction::band;
    case c10d::ReduceOp::BOR:
      return Reduction::bor;
    case c10d::ReduceOp::BXOR:
      return Reduction::bxor;
    default:
      throw UsageError("the backend hierarchical has not the reduction premul_sum",
                       "scale the tensor before and use sum");
  }
}

// As shm's kernels do it: integers towards zero, the parts of a complex number each by itself.
void divide(std::byte* data, size_t count, at::ScalarType type, int ranks) {
  at::Tensor values = at::from_blob(data, {static_cast<int64_t>(count)}, type);
  if (values.is_complex()) values = at::view_as_real(values);
  if (at::isIntegralType(type, false)) {
    values.div_(ranks, "trunc");
  } else {
    values.div_(ranks);
  }
}

}  // namespace

Joining joining_of(const at::Tensor& tensor, const c10d::ReduceOp& op, int ranks) {
  const at::ScalarType type = tensor.scalar_type();
  const shm::Reduction reduction = reduction_kind(op);
  Joining joining;
  joining.type = data_type(type);
  if (!shm::reduce_kernel(joining.type, reduction)) {
    throw UsageError(
        std::string("a reduction that dtype ") + c10::toString(type) + " does not have",
        op.op_ >= c10d::ReduceOp::BAND ? "bitwise reductions are for integers and bool"
                                       : "bool has no average, complex numbers have no order");
  }
  const bool average = reduction == shm::Reduction::avg;
  joining.kernel = shm::reduce_kernel(joining.type, average ? shm::Reduction::sum : reduction);
  if (average)
    joining.divide = [type, ranks](std::byte* data, size_t count) {
      divide(data, count, type, ranks);
    };
  return joining;
}

}  // namespace lockstep::hierarchical
