#include "lockstep/train/stop_signal.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace lockstep {
namespace {

TEST(StopSignal, NotesTheFirstSignal) {
  const StopSignal signals;
  EXPECT_EQ(signals.received(), 0);
  ::raise(SIGTERM);
  ::raise(SIGINT);
  EXPECT_EQ(signals.received(), SIGTERM);
}

TEST(StopSignal, StartsAnewAndPutsHandlersBack) {
  struct sigaction before {};
  ::sigaction(SIGHUP, nullptr, &before);
  {
    const StopSignal signals;
    ::raise(SIGHUP);
  }
  struct sigaction after {};
  ::sigaction(SIGHUP, nullptr, &after);
  EXPECT_EQ(before.sa_handler, after.sa_handler);
  EXPECT_EQ(StopSignal().received(), 0);
}

TEST(StopSignal, LeavesIgnoredSignalsIgnored) {
  ::signal(SIGHUP, SIG_IGN);
  {
    const StopSignal signals;
    ::raise(SIGHUP);
    EXPECT_EQ(signals.received(), 0);
  }
  ::signal(SIGHUP, SIG_DFL);
}

TEST(StopSignal, RequestCountsAsASignal) {
  const StopSignal signals;
  StopSignal::request(SIGPIPE);
  EXPECT_EQ(signals.received(), SIGPIPE);
}

TEST(StopSignal, ASecondOneOfTheSameKindEndsTheProcess) {
  EXPECT_EXIT(
      {
        const StopSignal signals;
        ::raise(SIGTERM);
        ::raise(SIGTERM);
      },
      testing::ExitedWithCode(143), "");
}

}  // namespace
}  // namespace lockstep
