#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/group_impl.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::testing {

struct RankOptions {
  std::chrono::milliseconds timeout{20'000};
  DebugLevel debug = DebugLevel::info;
  Store store = {};  ///< Empty: one in memory.
  std::string backend = "gloo";
};

/// Runs `body` once a rank, each on a thread of its own with a group over loopback, and
/// rethrows the first failure after all have ended. Each rank's default group is closed when its
/// body is done.
void run_ranks(int size, const std::function<void(ProcessGroup)>& body,
               const RankOptions& options = {});

/// The same without a default group: what World would give to `form_group`.
std::shared_ptr<GroupContext> test_context(int rank, int size, const RankOptions& options);

}  // namespace lockstep::testing
