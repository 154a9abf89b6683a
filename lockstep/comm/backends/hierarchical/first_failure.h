#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "lockstep/comm/backends/hierarchical/store_requests.h"
#include "lockstep/comm/checks/check_context.h"

namespace lockstep::hierarchical {

/// Why a group is of no more use.
using Cause = CheckContext::Failure;

/// The first failure of a group, told to all its hosts through the store. Any thread may call.
/// Nothing throws or blocks for long, as a store that is lost as well changes nothing.
class FirstFailure {
 public:
  /// `context`: of the checks among the group's ranks. There the ranks tell each other in what they
  /// failed.
  explicit FirstFailure(std::shared_ptr<CheckContext> context) : requests_(std::move(context)) {}

  /// Tells it unless another cause was told before. Returns the one that holds. The checks are told
  /// that this rank failed in `call`. From then on the store is asked no more.
  Cause raise(const Cause& cause, const std::string& call) noexcept;
  /// What was told, if anything. Asks the store.
  std::optional<Cause> heard() noexcept;

 private:
  std::mutex mutex_;
  std::optional<Cause> known_;
  StoreRequests requests_;
};

}  // namespace lockstep::hierarchical
