#pragma once

// For tests: a ProcessGroup whose ranks are threads of this process.

#include <functional>
#include <memory>
#include <string>

#include "lockstep/comm/group_impl.h"
#include "lockstep/comm/process_group.h"
#include "tests/support/run_ranks.h"

namespace lockstep::test {

struct RankOptions {
  std::chrono::milliseconds timeout{20'000};
  DebugLevel debug = DebugLevel::info;
  Store store = {};  ///< Empty: one in memory.
  std::string backend = "gloo";
  std::string hosts = {};  ///< "aab": the last rank counts as of another host than the first two.
};

/// As run_ranks, with a group over loopback, and rethrows the first failure. Each rank's default
/// group is closed when its body is done.
void run_group(int size, const std::function<void(ProcessGroup)>& body, RankOptions options = {});

/// The same without a default group: what World would give to `form_group`.
std::shared_ptr<GroupContext> test_context(int rank, int size, const RankOptions& options);

}  // namespace lockstep::test
