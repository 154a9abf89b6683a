#pragma once

// For tests: the same over each backend, the default one first.

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>

#include "tests/support/run_group.h"

namespace lockstep::test {

/// Its tests run over shared memory, Gloo, and hosts that are joined. There the last rank counts as
/// of another host than the rest.
class OverBackends : public ::testing::TestWithParam<std::string> {
 protected:
  static void run_group(int size, const std::function<void(ProcessGroup)>& body,
                        RankOptions options = {}) {
    options.backend = GetParam();
    if (options.backend == "hierarchical") {
      options.hosts = std::string(static_cast<size_t>(size - 1), 'a') + "b";
    }
    test::run_group(size, body, std::move(options));
  }
};

inline auto over_backends() {
  return ::testing::Values("shm", "gloo", "hierarchical");
}

inline std::string backend_name(const ::testing::TestParamInfo<std::string>& info) {
  return info.param;
}

}  // namespace lockstep::test
