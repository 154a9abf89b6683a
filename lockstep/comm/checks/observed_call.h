#pragma once

#include <chrono>
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

/// When a collective of this rank began and ended, by the steady clock, which the processes of one
/// host share. What lies between is also the wait for ranks that come later.
struct ObservedCall {
  using Time = std::chrono::steady_clock::time_point;
  Operation operation = Operation::barrier;
  int64_t bytes = 0;  ///< Of this rank's input tensors.
  Time begin;         ///< The caller began it.
  Time returned;      ///< The caller got its thread back: from here on it can do other things.
  Time end;           ///< The result was there.
};

/// Is told of a group's collectives. Calls come from the threads that begin and end them, several
/// at once.
class CallObserver {
 public:
  virtual ~CallObserver() = default;
  /// Before a collective is begun.
  virtual void call_begins() noexcept = 0;
  /// Once for each that began, in the order in which they end. It may come shortly after the
  /// threads that wait for the collective have gone on. `failed`: by throwing at its beginning, or
  /// with an error.
  virtual void call_ended(const ObservedCall& call, bool failed) noexcept = 0;
};

/// How much a group checks that its ranks agree: `off`, `info` (the first collectives of a group),
/// `detail` (every one).
enum class DebugLevel { off, info, detail };

}  // namespace lockstep
