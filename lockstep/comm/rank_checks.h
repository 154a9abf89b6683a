#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "lockstep/comm/call_signature.h"
#include "lockstep/comm/group_context.h"

namespace lockstep {

/// Compares the ranks' calls over the store. Each rank sets its signature under its own key and
/// adds one to the number of arrivals; who arrives last reads all signatures, judges, and adds one
/// to the number of passed comparisons, which the others poll. So a comparison costs each rank two
/// round trips and some polls, whatever the size of the group, and leaves no keys behind.
class RankChecks {
 public:
  /// `announced`: CheckedBackendOptions::announced.
  RankChecks(GroupContext& context, bool announced) : context_(context), announced_(announced) {}

  /// Whether this group compares at all: all ranks have announced themselves. Decided by whoever
  /// asks first, the same on all ranks.
  bool active();

  /// Blocks until all ranks have come with a call. Throws MismatchError, TimeoutError naming the
  /// ranks that did not come, PeerLostError naming those that ended. After the last two the group
  /// is of no use: every later comparison, on every rank, throws what the first one threw.
  void compare(const CallSignature& call, std::chrono::milliseconds timeout);

 private:
  bool decide();
  int64_t judge(const CallSignature& mine);
  void await(const CallSignature& mine, std::chrono::milliseconds timeout);
  /// Throws when `state` says that the group is broken.
  void throw_if_broken(int64_t state);
  [[noreturn]] void give_up(const CallSignature& mine, std::chrono::milliseconds timeout,
                            const std::vector<int>& ended);
  std::string who_is_missing(const CallSignature& mine);
  void break_group(char kind, const std::string& text);
  std::string called(const CallSignature& call) const;

  GroupContext& context_;
  const bool announced_;
  std::mutex mutex_;
  std::optional<bool> active_;
  int64_t compared_ = 0;    ///< Comparisons that this rank has entered.
  int64_t mismatches_ = 0;  ///< Of them, those that ended in a mismatch.
};

}  // namespace lockstep
