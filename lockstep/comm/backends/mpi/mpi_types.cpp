#include "lockstep/comm/backends/mpi/mpi_types.h"

#include <ATen/ATen.h>

#include <array>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::mpi {
namespace {

using Op = c10d::ReduceOp;

MPI_Datatype reduced_type(at::ScalarType dtype) {
  static const std::pair<at::ScalarType, MPI_Datatype> kTypes[] = {
      {at::kFloat, MPI_FLOAT},
      {at::kDouble, MPI_DOUBLE},
      {at::kByte, MPI_UINT8_T},
      {at::kChar, MPI_INT8_T},
      {at::kShort, MPI_INT16_T},
      {at::kInt, MPI_INT32_T},
      {at::kLong, MPI_INT64_T},
      {at::kBool, MPI_C_BOOL},
      {at::kComplexFloat, MPI_C_FLOAT_COMPLEX},
      {at::kComplexDouble, MPI_C_DOUBLE_COMPLEX}};
  for (const auto& [theirs, mpis] : kTypes)
    if (theirs == dtype) return mpis;
  throw UsageError(
      std::string("the backend mpi has no reductions of dtype ") + c10::toString(dtype),
      "convert the tensor first, for instance to float32");
}

/// The sum of small integers. Open MPI's own with AVX saturates in a part of the elements; this one
/// wraps round, as all other backends' do.
template <class Integer>
void add_to(void* from, void* to, int* count, MPI_Datatype*) {
  const auto* values = static_cast<const Integer*>(from);
  auto* sums = static_cast<Integer*>(to);
  for (int i = 0; i < *count; ++i) sums[i] = static_cast<Integer>(sums[i] + values[i]);
}

struct SmallSum {
  at::ScalarType dtype;
  MPI_User_function* add;
  MPI_Op op = MPI_OP_NULL;
};
/// Made when MPI starts. They live as long as MPI does.
std::array<SmallSum, 3> small_sums{
    {{at::kChar, add_to<int8_t>}, {at::kByte, add_to<uint8_t>}, {at::kShort, add_to<int16_t>}}};

/// The MPI operations in c10d's order.
using MpiOps = std::array<MPI_Op, 8>;
static_assert(MpiOps().size() == size_t{Op::BXOR} + 1);

MPI_Op op_for(at::ScalarType dtype, Op::RedOpType op) {
  static const MpiOps logical{MPI_LOR, MPI_OP_NULL, MPI_LAND, MPI_LAND,
                              MPI_LOR, MPI_LAND,    MPI_LOR,  MPI_LXOR};
  static const MpiOps arithmetic{MPI_SUM, MPI_SUM,  MPI_PROD, MPI_MIN,
                                 MPI_MAX, MPI_BAND, MPI_BOR,  MPI_BXOR};
  const auto index = static_cast<size_t>(op);
  for (const auto& sum : small_sums)
    if (sum.dtype == dtype && arithmetic[index] == MPI_SUM) return sum.op;
  return (dtype == at::kBool ? logical : arithmetic)[index];
}

}  // namespace

void make_small_sums() {
  for (auto& sum : small_sums)
    if (sum.op == MPI_OP_NULL)
      check(MPI_Op_create(sum.add, /*commute=*/1, &sum.op), "MPI_Op_create");
}

Reduction reduction_of(at::ScalarType dtype, const c10d::ReduceOp& op) {
  Reduction reduction;
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  reduction.dtype = half ? at::kFloat : dtype;
  reduction.type = reduced_type(reduction.dtype);
  reduction.op = op_for(dtype, op.op_);
  return reduction;
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
