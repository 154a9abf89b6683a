#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "lockstep/comm/backends/hierarchical/store_requests.h"
#include "lockstep/comm/checks/check_context.h"

namespace lockstep::hierarchical {

/// The first failure of a group, told to all its hosts through the store. Any thread may call.
/// Nothing throws or blocks for long, as a store that is lost as well changes nothing.
class FirstFailure {
 public:
  /// `context`: of the checks among the group's ranks. There the ranks tell each other in what they
  /// failed.
  explicit FirstFailure(std::shared_ptr<CheckContext> context) : requests_(std::move(context)) {}

  /// Tells it unless another cause was told before. Returns the one that holds. The checks are told
  /// that this rank failed in `call`, unless that is empty. From then on the store is asked no
  /// more.
  Failure raise(const Failure& cause, const std::string& call) noexcept;
  /// What was told, if anything, and what `missed` says. Asks the store.
  std::optional<Failure> heard() noexcept;
  /// That a rank of another host is gone which has not come to the present call. This is told as a
  /// failure then. Asks the store.
  std::optional<Failure> missed() noexcept;

  /// The number of the call that this rank makes; 0 between calls.
  void set_call(int64_t call) noexcept { call_ = call; }
  bool has_call() const noexcept { return call_ > 0; }
  /// Tells the other hosts of a rank of this one.
  void tell_gone(int rank, const Failure& gone) noexcept;

 private:
  std::optional<Failure> ask(bool only_missed) noexcept;

  std::mutex mutex_;
  std::optional<Failure> known_;
  std::atomic<int64_t> call_{0};
  StoreRequests requests_;
};

}  // namespace lockstep::hierarchical
