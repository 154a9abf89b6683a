#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep {

/// Our names of the calls, those of ProcessGroup.
enum class Operation : uint8_t {
  all_reduce,
  all_reduce_coalesced,
  all_reduce_sparse,
  broadcast,
  reduce,
  all_gather,
  all_gather_into_tensor,
  all_gather_coalesced,
  all_gather_into_tensor_coalesced,
  gather,
  scatter,
  reduce_scatter,
  reduce_scatter_tensor,
  reduce_scatter_tensor_coalesced,
  all_to_all,
  all_to_all_single,
  barrier,
  monitored_barrier,
  symmetric_empty,
  coalesced,
  send,
  recv,
  recv_any,
};

std::string_view operation_name(Operation operation);

}  // namespace lockstep
