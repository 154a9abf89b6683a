#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "lockstep/base/env.h"
#include "lockstep/rpc/rpc.h"

namespace lockstep::rpc::test {

/// For tests: starts this program once more, to run the disabled test `test` alone. There
/// `join_group` makes the process a worker of that name.
inline pid_t start_joining(const std::string& address, const std::string& name,
                           const std::string& test) {
  const std::string filter = "--gtest_filter=" + test;
  const pid_t process = ::fork();
  if (process != 0) return process;
  ::setenv("RPC_TEST_ADDRESS", address.c_str(), 1);
  ::setenv("RPC_TEST_NAME", name.c_str(), 1);
  for (const char* variable : {"RANK", "WORLD_SIZE", "LOCAL_RANK"}) ::unsetenv(variable);
  ::execl("/proc/self/exe", "worker", "--gtest_also_run_disabled_tests", filter.c_str(), nullptr);
  ::_exit(127);
}

inline std::string joining_name() {
  return env_string("RPC_TEST_NAME").value();
}

inline Agent join_group() {
  return rpc::join(env_string("RPC_TEST_ADDRESS").value(), joining_name());
}

inline void expect_success(pid_t process) {
  int status = -1;
  ASSERT_EQ(::waitpid(process, &status, 0), process);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace lockstep::rpc::test
