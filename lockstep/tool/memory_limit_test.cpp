#include "lockstep/tool/memory_limit.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdlib>

namespace lockstep::tool {
namespace memory_limit_test {

void limit_addresses() {
  rlimit limit{};
  ::getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = rlim_t{1} << 42;
  ::setrlimit(RLIMIT_AS, &limit);
}

TEST(AbortMeansMemory, TellsTheLimitInPlaceOfTheSignal) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer takes more addresses than the limit";
#endif
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        limit_addresses();
        const AbortMeansMemory guard("lockstep x: error: aborted");
        std::abort();
      },
      testing::ExitedWithCode(1),
      "^lockstep x: error: aborted\n  hint: a memory limit holds: `ulimit -v` allows each process "
      "4.4 TB of addresses.*\n$");
}

TEST(AbortMeansMemory, IsAbortWithoutALimitAndAfterItsLife) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EQ(memory_limit_hint(), "");
  EXPECT_EXIT(
      {
        const AbortMeansMemory guard("lockstep x: error: aborted");
        std::abort();
      },
      testing::KilledBySignal(SIGABRT), "");
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_EXIT(
      {
        limit_addresses();
        { const AbortMeansMemory guard("lockstep x: error: aborted"); }
        std::abort();
      },
      testing::KilledBySignal(SIGABRT), "");
#endif
}

}  // namespace memory_limit_test
}  // namespace lockstep::tool
