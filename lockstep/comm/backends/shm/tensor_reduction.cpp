#include "lockstep/comm/backends/shm/tensor_reduction.h"

#include <string>

#include "lockstep/base/error.h"

namespace lockstep::shm {

ReduceKernel kernel_for(at::ScalarType type, const c10d::ReduceOp& op) {
  using Op = c10d::ReduceOp;
  static_assert(static_cast<DataType>(at::kDouble) == DataType::f64 &&
                static_cast<DataType>(at::kBool) == DataType::boolean &&
                static_cast<DataType>(at::kComplexDouble) == DataType::c128 &&
                static_cast<DataType>(at::kBFloat16) == DataType::bf16 &&
                static_cast<Reduction>(Op::AVG) == Reduction::avg &&
                static_cast<Reduction>(Op::MAX) == Reduction::max &&
                static_cast<Reduction>(Op::BXOR) == Reduction::bxor);
  const auto kernel = reduce_kernel(static_cast<DataType>(type), static_cast<Reduction>(op.op_));
  if (kernel) return kernel;
  throw UsageError(std::string("shared memory has no reductions of dtype ") + c10::toString(type),
                   "convert the tensor first, for instance to float32");
}

}  // namespace lockstep::shm
