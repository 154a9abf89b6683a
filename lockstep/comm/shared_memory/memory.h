#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/base/file.h"

namespace lockstep::shm {

size_t whole_pages(size_t bytes);
/// Whole cache lines.
inline size_t up_to_line(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

/// How the ranks find each other: a store's set and its get.
struct Meeting {
  std::function<void(const std::string& value)> tell;
  /// Empty for as long as rank 0 has not told, or blocks. Throws when it does not tell in time.
  std::function<std::string()> ask;
};

struct MeetingOptions {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{120'000};  ///< Until all have come.
  std::string group = "0";                     ///< For messages.
  std::vector<int> names = {};  ///< The ranks' numbers in the default group. Empty: the same.
  /// Called again and again with the ranks that are waited for. May throw.
  std::function<void(const std::vector<int>& ranks)> look = {};
};

/// Zeroed memory that the processes of a group have mapped. Rank 0 makes it, the others open it
/// through /proc. So all must be of one user and one process namespace. It has no name: nothing is
/// left behind however they end, and no mount's size limits it. It counts towards `ulimit -f`.
class SharedMemory {
 public:
  /// On rank 0 it makes the memory. The pages of the first `reserved` of its `bytes` are there when
  /// it returns. So a lack of memory is an error here and no SIGBUS later. On the others it blocks
  /// until rank 0 `meet`s. Throws PeerLostError when rank 0 has ended, UsageError for another user
  /// or namespace, TimeoutError, SystemError, CommError and what `look` throws.
  SharedMemory(const MeetingOptions& options, const Meeting& meeting, size_t bytes,
               size_t reserved);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  /// Once. Rank 0 lets the others in, and blocks until all have called this. It throws TimeoutError
  /// naming those that did not, and what `look` throws.
  void meet();

  std::byte* data() const { return mapped_ + offset_; }

 private:
  /// What it begins with.
  struct Arrivals {
    std::atomic<uint32_t> count;
    std::atomic<uint8_t> of_rank[1];  ///< One for each.
  };
  Arrivals& arrivals() const { return *reinterpret_cast<Arrivals*>(mapped_); }
  UniqueFd open_memory_of_rank_0() const;
  std::vector<int> missing() const;
  std::vector<int> in_default_group(std::vector<int> ranks) const;
  std::string what() const { return "shared memory of group '" + options_.group + "': "; }

  const MeetingOptions options_;
  const Meeting meeting_;
  const size_t offset_;
  const size_t bytes_;
  UniqueFd memory_;  ///< On rank 0, until all have come.
  std::byte* mapped_ = nullptr;
};

}  // namespace lockstep::shm
