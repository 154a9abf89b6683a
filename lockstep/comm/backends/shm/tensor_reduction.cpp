#include "lockstep/comm/backends/shm/tensor_reduction.h"

#include <string>

#include "lockstep/base/error.h"

namespace lockstep::shm {

DataType data_type(at::ScalarType type) {
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
          std::string("shared memory has no reductions of dtype ") + c10::toString(type),
          "convert the tensor first, for instance to float32");
  }
}

Reduction reduction_kind(const c10d::ReduceOp& op) {
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
      throw UsageError("shared memory has not the reduction premul_sum",
                       "scale the tensor before and use sum");
  }
}

ReduceKernel kernel_for(at::ScalarType type, const c10d::ReduceOp& op) {
  const ReduceKernel kernel = reduce_kernel(data_type(type), reduction_kind(op));
  if (!kernel) {
    const bool bitwise = op.op_ >= c10d::ReduceOp::BAND;
    throw UsageError(
        std::string("a reduction that dtype ") + c10::toString(type) + " does not have",
        bitwise ? "bitwise reductions are for integers and bool"
                : "bool has no average, complex numbers have no order");
  }
  return kernel;
}

}  // namespace lockstep::shm
