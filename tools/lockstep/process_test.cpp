#include "tools/lockstep/process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "lockstep/base/error.h"

namespace lockstep::tool {
namespace process_test {

using testing::HasSubstr;
using testing::Not;

std::vector<std::string> shell(const std::string& script) {
  return {"/bin/sh", "-c", script};
}

TEST(BenchProcess, GivesOutputsStatusAndTime) {
  const auto result = run_process(shell("echo out; echo err >&2; exit 3"));
  EXPECT_EQ(result.status, 3);
  EXPECT_EQ(result.out, "out\n");
  EXPECT_EQ(result.err, "err\n");
  EXPECT_GT(result.seconds, 0);
}

TEST(BenchProcess, GivesTheSignalThatEndedIt) {
  EXPECT_EQ(run_process(shell("kill -KILL $$")).status, 128 + SIGKILL);
}

TEST(BenchProcess, ChangesTheEnvironment) {
  ::setenv("BENCH_TEST_GONE", "there", 1);
  const auto result = run_process(shell("echo ${BENCH_TEST_GONE-unset} $BENCH_TEST_NEW"),
                                  {{"BENCH_TEST_GONE", ""}, {"BENCH_TEST_NEW", "a=b c"}});
  EXPECT_EQ(result.out, "unset a=b c\n");
  ::unsetenv("BENCH_TEST_GONE");
}

TEST(BenchProcess, PeakMemoryIsThatOfTheLargestDescendant) {
  // dd holds one block in memory; the shell that waits for it is small.
  const auto large = run_process(shell("dd if=/dev/zero of=/dev/null bs=300M count=1 & wait"));
  EXPECT_GT(large.peak_bytes, 300'000'000);
  EXPECT_LT(large.peak_bytes, 600'000'000);
}

TEST(BenchProcess, ATimeoutNamesTheCommandAndLeavesNoProcess) {
  try {
    run_process(shell("trap '' TERM; while :; do sleep 0.05; done"), {},
                std::chrono::milliseconds(50));
    FAIL() << "no time-out";
  } catch (const TimeoutError& error) {
    EXPECT_THAT(error.what(), HasSubstr("/bin/sh -c trap"));
    EXPECT_THAT(error.what(), HasSubstr("50ms"));
  }
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST(BenchProcess, AnInterruptEndsTheChildFirst) {
  const auto orderly = hold_interrupts();
  ::kill(::getpid(), SIGINT);
  try {
    run_process(shell("exec sleep 600"));
    FAIL() << "not interrupted";
  } catch (const InterruptedError& error) {
    EXPECT_EQ(error.signal_number(), SIGINT);
  }
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST(BenchProcess, AProgramThatIsNotThereFails) {
  EXPECT_EQ(run_process({"/nowhere/program"}).status, 127);
}

TEST(BenchProcess, ExpectSuccessShowsTheLastLines) {
  EXPECT_NO_THROW(expect_success("job", run_process(shell("exit 0"))));
  try {
    expect_success("job", run_process(shell("seq 100 >&2; exit 4")));
    FAIL() << "nothing thrown";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("job failed with exit code 4"));
    EXPECT_THAT(error.what(), HasSubstr("100"));
    EXPECT_THAT(error.what(), Not(HasSubstr("50")));
  }
}

}  // namespace process_test
}  // namespace lockstep::tool
