#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

#include "lockstep/comm/checks/call_signature.h"
#include "lockstep/comm/checks/check_context.h"

namespace lockstep {

/// Compares the ranks' calls over the store. Each rank sets its signature under its own key and
/// adds one to the number of arrivals. The last rank to arrive reads all signatures, judges, and
/// adds one to the number of passed comparisons. The others poll that number. So a comparison costs
/// each rank two round trips and some polls, whatever the size of the group, and leaves no keys
/// behind.
class RankChecks {
 public:
  /// `limit`: how many of the first collectives this rank would compare. 0 for none, kAll for all.
  RankChecks(CheckContext& context, uint64_t limit) : context_(context), limit_(limit) {}
  static constexpr uint64_t kAll = UINT64_MAX;

  /// Whether the call of this number (from 1) is to be compared. The first one asks the store: it
  /// needs that all ranks have announced themselves, and the rank that asks first decides for all.
  bool compares(uint64_t number) {
    return number <= limit_.load(std::memory_order_relaxed) && (decided_ || decide()) &&
           number <= limit_.load(std::memory_order_relaxed);
  }

  /// Decides for all, before anyone asks, that nothing is compared.
  static void switch_off(c10d::Store& store, const std::string& prefix);

  /// Blocks until all ranks have come with a call. Throws MismatchError, TimeoutError naming the
  /// ranks that did not come, PeerLostError naming those that ended or left the group. After the
  /// last two the group is of no use: every later comparison of this rank throws the same.
  void compare(const CallSignature& call, std::chrono::milliseconds timeout);

 private:
  bool decide();
  uint64_t agree();
  void meet(const CallSignature& mine, std::chrono::milliseconds timeout);
  void judge(const CallSignature& mine);
  void await(const CallSignature& mine, std::chrono::milliseconds timeout);
  Failure who_is_missing(const CallSignature& mine);
  std::string called(const CallSignature& call) const;

  CheckContext& context_;
  std::atomic<uint64_t> limit_;  ///< Ours, then the group's.
  std::atomic<bool> decided_{false};
  std::mutex mutex_;
  int64_t compared_ = 0;    ///< Comparisons that this rank has entered.
  int64_t mismatches_ = 0;  ///< Of them, those that ended in a mismatch.
  std::exception_ptr failed_;
};

}  // namespace lockstep
