#include "lockstep/comm/backends/mpi/mpi_types.h"

#include <ATen/ATen.h>

#include "lockstep/base/error.h"

namespace lockstep::mpi {
namespace {

using Op = c10d::ReduceOp;

MPI_Datatype reduced_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
      return MPI_UINT8_T;
    case at::kChar:
      return MPI_INT8_T;
    case at::kShort:
      return MPI_INT16_T;
    case at::kInt:
      return MPI_INT32_T;
    case at::kLong:
      return MPI_INT64_T;
    case at::kFloat:
      return MPI_FLOAT;
    case at::kDouble:
      return MPI_DOUBLE;
    case at::kBool:
      return MPI_C_BOOL;
    case at::kComplexFloat:
      return MPI_C_FLOAT_COMPLEX;
    case at::kComplexDouble:
      return MPI_C_DOUBLE_COMPLEX;
    default:
      throw UsageError(
          std::string("the backend mpi has no reductions of dtype ") + c10::toString(dtype),
          "convert the tensor first, for instance to float32");
  }
}

[[noreturn]] void throw_lacking(at::ScalarType dtype, Op::RedOpType op) {
  const bool bitwise = op >= Op::BAND && op <= Op::BXOR;
  throw UsageError(
      std::string("a reduction that dtype ") + c10::toString(dtype) + " does not have",
      bitwise ? "bitwise reductions are for integers and bool"
              : "bool has no average, complex numbers have no order, premul_sum is for fractions");
}

MPI_Op logical_op(Op::RedOpType op) {
  switch (op) {
    case Op::SUM:
    case Op::MAX:
    case Op::BOR:
      return MPI_LOR;
    case Op::PRODUCT:
    case Op::MIN:
    case Op::BAND:
      return MPI_LAND;
    case Op::BXOR:
      return MPI_LXOR;
    default:
      throw_lacking(at::kBool, op);
  }
}

MPI_Op arithmetic_op(at::ScalarType dtype, Op::RedOpType op) {
  const bool ordered = op == Op::MIN || op == Op::MAX;
  const bool bitwise = op >= Op::BAND && op <= Op::BXOR;
  if (ordered && at::isComplexType(dtype)) throw_lacking(dtype, op);
  const bool integral = at::isIntegralType(dtype, /*includeBool=*/false);
  if (bitwise && !integral) throw_lacking(dtype, op);
  if (op == Op::PREMUL_SUM && integral) throw_lacking(dtype, op);
  switch (op) {
    case Op::SUM:
    case Op::AVG:
    case Op::PREMUL_SUM:
      return MPI_SUM;
    case Op::PRODUCT:
      return MPI_PROD;
    case Op::MIN:
      return MPI_MIN;
    case Op::MAX:
      return MPI_MAX;
    case Op::BAND:
      return MPI_BAND;
    case Op::BOR:
      return MPI_BOR;
    case Op::BXOR:
      return MPI_BXOR;
    default:
      throw UsageError("the backend mpi has no such reduction");
  }
}

}  // namespace

Reduction reduction_of(at::ScalarType dtype, const c10d::ReduceOp& op) {
  Reduction reduction;
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  reduction.dtype = half ? at::kFloat : dtype;
  reduction.type = reduced_type(reduction.dtype);
  reduction.op = dtype == at::kBool ? logical_op(op.op_) : arithmetic_op(dtype, op.op_);
  return reduction;
}

void premultiply(const at::Tensor& mine, const c10d::ReduceOp& op) {
  if (op.op_ != Op::PREMUL_SUM) return;
  const auto* factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (!factor) throw UsageError("premul_sum without its factor");
  if (factor->tensor_factor.defined()) {
    mine.mul_(factor->tensor_factor.to(mine.scalar_type()));
  } else {
    mine.mul_(factor->double_factor);
  }
}

MPI_Datatype moved_type(at::ScalarType dtype) {
  switch (c10::elementSize(dtype)) {
    case 1:
      return MPI_BYTE;
    case 2:
      return MPI_INT16_T;
    case 4:
      return MPI_INT32_T;
    case 8:
      return MPI_INT64_T;
    case 16:
      return MPI_C_DOUBLE_COMPLEX;
    default:
      throw UsageError(std::string("the backend mpi cannot send elements of dtype ") +
                       c10::toString(dtype));
  }
}

int count_of(Operation operation, int64_t elements) {
  if (elements <= kMostElements) return static_cast<int>(elements);
  throw UsageError(std::string(operation_name(operation)) + ": " + std::to_string(elements) +
                       " elements for one rank; MPI counts to " + std::to_string(kMostElements),
                   "cut the tensor into several calls");
}

}  // namespace lockstep::mpi
