#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/comm/checks/call_signature.h"

namespace lockstep {

/// A ring of this process's last calls in all groups of its World.
///
/// The file has the format of PyTorch's flight recorder, which `lockstep debug` and
/// `torch.distributed.flight_recorder.fr_trace` read. PyTorch's variables set it up:
/// - TORCH_FR_BUFFER_SIZE, TORCH_NCCL_TRACE_BUFFER_SIZE: the number of calls. 2000 as there; 0:
/// off.
/// - TORCH_FR_DUMP_TEMP_FILE, TORCH_NCCL_DEBUG_INFO_TEMP_FILE: the file without the rank at its
///   end. By default ~/.cache/torch/comm_lib_trace_rank_ as there: a folder of the user's own.
///
/// It is written at the first failure of a World (late, lost or differing ranks), and by these
/// signals where the program has left them alone when its first group forms:
/// - USR2, at any time,
/// - TERM, if no call has begun for a second. By that a launcher ends the rank that the others
///   waited for in vain. The process then ends by TERM.
///
/// Any thread may call. One per process: handlers of signals have no other way to reach it.
class FlightRecorder {
 public:
  static FlightRecorder& of_process();
  /// `calls`: the size of the ring, which becomes a power of two; 0: nothing is noted. `file`:
  /// where a rank's calls go, without the rank's number.
  FlightRecorder(size_t calls, std::string file);

  /// A group and its ranks, by their numbers in the default group. A second group of a name belongs
  /// to the next World: from then on the calls of former ones are not written.
  size_t add_group(const std::string& name, const std::string& backend, const RankNames& ranks,
                   int rank);
  /// Notes a call of a group that `add_group` gave, of outputs as the inputs where it has none.
  /// Gives its number, 0 where nothing is noted. The calling thread begins this call until it calls
  /// `begun`.
  uint64_t begin(size_t group, const CallSignature& call);
  static void begun();
  /// The call that this thread begins, once: for the work that is made for it.
  static uint64_t take();
  /// The call has ended, with an error or none. Only the first end of a call counts. A failure
  /// between ranks writes the file.
  void end(uint64_t call, const std::exception_ptr& error) noexcept;
  /// How long this thread has been in calls that had ended when they came back to it.
  static std::chrono::nanoseconds time_in_calls();

  /// Writes the file. False where it cannot be written.
  bool dump();

 private:
  struct Entry {
    CallSignature call;
    size_t group = 0;
    std::atomic<uint64_t> number{0};  ///< 0: none, or not yet written.
    int64_t created = 0;              ///< In ticks of LibTorch's approximate clock.
    std::atomic<int64_t> ended{0};    ///< Likewise; 0: not yet.
    std::atomic<bool> failed{false};
  };
  struct Group {
    std::string name, backend;
    std::string ranks;  ///< "[0, 2]"
    int rank = 0;       ///< This process, in the group.
  };
  class Pickle;
  static void on_signal(int number);
  bool write_file() const noexcept;  ///< Allocates nothing, for a signal handler.
  void write(Pickle& out) const;
  void write(Pickle& out, const Entry& entry) const;
  double ns_per_tick() const;
  Entry& entry_of(uint64_t call) { return ring_[call & (ring_.size() - 1)]; }
  const Entry& entry_of(uint64_t call) const { return ring_[call & (ring_.size() - 1)]; }

  const std::string file_;
  const int64_t start_ns_, start_ticks_;
  std::mutex mutex_;  ///< Guards what follows; a signal handler that cannot have it reads on.
  std::vector<Entry> ring_;
  uint64_t last_ = 0;         ///< Number of the last call.
  std::deque<Group> groups_;  ///< Of all Worlds so far.
  size_t first_group_ = 0;    ///< Of this World.
  uint64_t first_call_ = 1;   ///< Likewise.
  std::string path_;
  std::atomic<bool> dumped_{false};  ///< Because of a failure of this World.
};

}  // namespace lockstep
