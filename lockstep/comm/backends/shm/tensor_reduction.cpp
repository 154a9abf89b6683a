#include "lockstep/comm/backends/shm/tensor_reduction.h"

#include <string>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::shm {

DataType data_type(at::ScalarType type) {
  static constexpr std::pair<at::ScalarType, DataType> kTypes[] = {
      {at::kFloat, DataType::f32},        {at::kDouble, DataType::f64},
      {at::kHalf, DataType::f16},         {at::kBFloat16, DataType::bf16},
      {at::kByte, DataType::u8},          {at::kChar, DataType::i8},
      {at::kShort, DataType::i16},        {at::kInt, DataType::i32},
      {at::kLong, DataType::i64},         {at::kBool, DataType::boolean},
      {at::kComplexFloat, DataType::c64}, {at::kComplexDouble, DataType::c128}};
  for (const auto& [theirs, ours] : kTypes)
    if (theirs == type) return ours;
  throw UsageError(std::string("shared memory has no reductions of dtype ") + c10::toString(type),
                   "convert the tensor first, for instance to float32");
}

Reduction reduction_kind(const c10d::ReduceOp& op) {
  using Op = c10d::ReduceOp;
  static_assert(static_cast<int>(Reduction::avg) == Op::AVG &&
                static_cast<int>(Reduction::max) == Op::MAX &&
                static_cast<int>(Reduction::bxor) == Op::BXOR);
  if (op.op_ > Op::BXOR)
    throw UsageError("shared memory has not the reduction premul_sum",
                     "scale the tensor before and use sum");
  return static_cast<Reduction>(op.op_);
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
