#include "lockstep/comm/backends/op_type.h"

namespace lockstep::backends {

c10d::OpType op_type(Operation operation) {
  switch (operation) {
    case Operation::all_reduce:
    case Operation::all_reduce_sparse:
      return c10d::OpType::ALLREDUCE;
    case Operation::all_reduce_coalesced:
      return c10d::OpType::ALLREDUCE_COALESCED;
    case Operation::broadcast:
      return c10d::OpType::BROADCAST;
    case Operation::reduce:
      return c10d::OpType::REDUCE;
    case Operation::all_gather:
      return c10d::OpType::ALLGATHER;
    case Operation::all_gather_into_tensor:
      return c10d::OpType::_ALLGATHER_BASE;
    case Operation::all_gather_coalesced:
    case Operation::all_gather_into_tensor_coalesced:
      return c10d::OpType::ALLGATHER_COALESCED;
    case Operation::gather:
      return c10d::OpType::GATHER;
    case Operation::scatter:
      return c10d::OpType::SCATTER;
    case Operation::reduce_scatter:
      return c10d::OpType::REDUCE_SCATTER;
    case Operation::reduce_scatter_tensor:
    case Operation::reduce_scatter_tensor_coalesced:
      return c10d::OpType::_REDUCE_SCATTER_BASE;
    case Operation::all_to_all:
      return c10d::OpType::ALLTOALL;
    case Operation::all_to_all_single:
      return c10d::OpType::ALLTOALL_BASE;
    case Operation::barrier:
    case Operation::monitored_barrier:
      return c10d::OpType::BARRIER;
    case Operation::send:
      return c10d::OpType::SEND;
    case Operation::recv:
      return c10d::OpType::RECV;
    case Operation::recv_any:
      return c10d::OpType::RECVANYSOURCE;
    default:
      return c10d::OpType::UNKNOWN;
  }
}

}  // namespace lockstep::backends
