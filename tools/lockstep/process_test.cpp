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

using std::chrono::seconds;
using testing::HasSubstr;
using testing::Not;

ProcessSpec shell(const std::string& script) {
  return {{"/bin/sh", "-c", script}};
}

TEST(BenchProcess, GivesOutputsStatusAndTime) {
  const auto result = run_process(shell("echo out; echo err >&2; exit 3"), seconds(60));
  EXPECT_EQ(result.status, 3);
  EXPECT_EQ(result.out, "out\n");
  EXPECT_EQ(result.err, "err\n");
  EXPECT_GT(result.seconds, 0);
}

TEST(BenchProcess, GivesTheSignalThatEndedIt) {
  EXPECT_EQ(run_process(shell("kill -KILL $$"), seconds(60)).status, 128 + SIGKILL);
}

TEST(BenchProcess, ChangesTheEnvironment) {
  ::setenv("BENCH_TEST_GONE", "there", 1);
  auto spec = shell("echo ${BENCH_TEST_GONE-unset} $BENCH_TEST_NEW");
  spec.env = {{"BENCH_TEST_GONE", ""}, {"BENCH_TEST_NEW", "new"}};
  EXPECT_EQ(run_process(spec, seconds(60)).out, "unset new\n");
  ::unsetenv("BENCH_TEST_GONE");
}

TEST(BenchProcess, PeakMemoryIsThatOfTheLargestDescendant) {
  // dd holds one block in memory; the shell that waits for it is small.
  const auto large =
      run_process(shell("dd if=/dev/zero of=/dev/null bs=300M count=1 & wait"), seconds(60));
  EXPECT_GT(large.peak_bytes, 300'000'000);
  EXPECT_LT(large.peak_bytes, 600'000'000);
}

TEST(BenchProcess, RunsSideBySide) {
  // Each waits until the other has opened the pipe: one after the other they would never end.
  const std::string pipe = testing::TempDir() + "bench_process_test." + std::to_string(::getpid());
  ::unlink(pipe.c_str());
  ASSERT_EQ(run_process(shell("mkfifo " + pipe), seconds(60)).status, 0);
  const auto results =
      run_processes({shell("echo hello > " + pipe), shell("cat " + pipe)}, seconds(60));
  ::unlink(pipe.c_str());
  EXPECT_EQ(results[0].status, 0);
  EXPECT_EQ(results[1].out, "hello\n");
}

TEST(BenchProcess, AFailureEndsTheOthers) {
  const auto results = run_processes({shell("exec sleep 600"), shell("exit 7")}, seconds(60));
  EXPECT_EQ(results[0].status, 128 + SIGTERM);
  EXPECT_EQ(results[1].status, 7);
  EXPECT_LT(results[0].seconds, 60);
}

TEST(BenchProcess, ATimeoutNamesTheCommandAndLeavesNoProcess) {
  try {
    run_processes({shell("trap '' TERM; while :; do sleep 0.05; done")},
                  std::chrono::milliseconds(50));
    FAIL() << "no time-out";
  } catch (const TimeoutError& error) {
    EXPECT_THAT(error.what(), HasSubstr("/bin/sh -c trap"));
    EXPECT_THAT(error.what(), HasSubstr("50ms"));
  }
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST(BenchProcess, AnInterruptEndsTheChildrenFirst) {
  const OrderlyInterrupts orderly;
  ::kill(::getpid(), SIGINT);
  try {
    run_processes({shell("exec sleep 600"), shell("exec sleep 600")}, seconds(60));
    FAIL() << "not interrupted";
  } catch (const InterruptedError& error) {
    EXPECT_EQ(error.signal_number(), SIGINT);
  }
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST(BenchProcess, AProgramThatIsNotThereFails) {
  EXPECT_EQ(run_process({{"/nowhere/program"}}, seconds(60)).status, 127);
}

TEST(BenchProcess, ExpectSuccessShowsTheLastLines) {
  EXPECT_NO_THROW(expect_success("job", run_process(shell("exit 0"), seconds(60))));
  try {
    expect_success("job", run_process(shell("seq 100 >&2; exit 4"), seconds(60)));
    FAIL() << "nothing thrown";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("job failed with exit code 4"));
    EXPECT_THAT(error.what(), HasSubstr("100"));
    EXPECT_THAT(error.what(), Not(HasSubstr("50")));
  }
}

}  // namespace process_test
}  // namespace lockstep::tool
