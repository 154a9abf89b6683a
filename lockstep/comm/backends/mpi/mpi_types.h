#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "lockstep/comm/backends/mpi/mpi_engine.h"
#include "lockstep/comm/checks/observed_call.h"

namespace lockstep::mpi {

/// How one reduction of one dtype is done by MPI.
struct Reduction {
  at::ScalarType dtype;  ///< In which it is done: float32 for float16 and bfloat16, which MPI has
                         ///< not; sums are then rounded once, whatever their order.
  MPI_Datatype type = MPI_DATATYPE_NULL;
  MPI_Op op = MPI_OP_NULL;
};

/// Throws UsageError for a dtype that MPI does not reduce. That the dtype has such a reduction is
/// checked before (backends::check_reduction). bool sums are "or", products "and", as shm's.
Reduction reduction_of(at::ScalarType dtype, const c10d::ReduceOp& op);

/// Once, on the MPI thread, when MPI has started: reductions use operations of our own.
void make_small_sums();

/// The MPI type of an element that is only moved.
MPI_Datatype moved_type(at::ScalarType dtype);

/// The most elements that one MPI operation may have: counts are ints.
inline constexpr int64_t kMostElements = INT32_MAX;
/// `elements` as MPI's count. Throws UsageError naming the operation when it is over the most.
int count_of(Operation operation, int64_t elements);

}  // namespace lockstep::mpi
