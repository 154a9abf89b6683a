#include "lockstep/train/stop_signal.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

#include "lockstep/base/same_signal.h"

namespace lockstep {
namespace stop_signal_test {

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

TEST(StopSignal, ASignalThatWasBlockedComes) {
  sigset_t term, before, after;
  sigemptyset(&term);
  sigaddset(&term, SIGTERM);
  ::pthread_sigmask(SIG_BLOCK, &term, &before);
  {
    const StopSignal signals;
    ::raise(SIGTERM);
    EXPECT_EQ(signals.received(), SIGTERM);
  }
  ::pthread_sigmask(SIG_SETMASK, &before, &after);
  EXPECT_EQ(sigismember(&after, SIGTERM), 1);
}

TEST(StopSignal, OneWithinAnotherTellsOfTheSame) {
  const StopSignal outer;
  ::raise(SIGTERM);
  { EXPECT_EQ(StopSignal().received(), SIGTERM); }
  EXPECT_EQ(outer.received(), SIGTERM);
}

TEST(StopSignal, NotesEachThatAUserMaySend) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1}) {
    const StopSignal signals;
    ::raise(number);
    EXPECT_EQ(signals.received(), number);
  }
}

TEST(StopSignal, Usr2EndsNothingAndReachesAHandlerOfTheProgram) {
  static std::atomic<int> came{0};
  EXPECT_EXIT(
      {
        {
          const StopSignal signals;
          ::raise(SIGUSR2);
          if (signals.received() != 0) ::_exit(1);
        }
        ::signal(SIGUSR2, [](int number) { came = number; });
        const StopSignal signals;
        ::raise(SIGUSR2);
        ::_exit(came == SIGUSR2 && signals.received() == 0 ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(StopSignal, LeavesIgnoredSignalsIgnored) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1}) {
    ::signal(number, SIG_IGN);
    {
      const StopSignal signals;
      ::raise(number);
      EXPECT_EQ(signals.received(), 0);
    }
    ::signal(number, SIG_DFL);
  }
}

TEST(StopSignal, RequestCountsAsASignal) {
  const StopSignal signals;
  StopSignal::request(SIGPIPE);
  EXPECT_EQ(signals.received(), SIGPIPE);
}

using Clock = std::chrono::steady_clock;

/// `timeout` sends its signal to the process and to the group.
TEST(StopSignal, TheSameOneAtOnceIsTheFirstOnceMore) {
  EXPECT_EXIT(
      {
        const StopSignal signals;
        ::raise(SIGTERM);
        ::raise(SIGTERM);
        ::_exit(signals.received() == SIGTERM ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(StopSignal, ASecondOneOfTheSameKindEndsTheProcess) {
  const auto start = Clock::now();
  EXPECT_EXIT(
      {
        const StopSignal signals;
        const auto deadline = start + std::chrono::seconds(20);
        while (Clock::now() < deadline) ::raise(SIGTERM);
      },
      testing::ExitedWithCode(143), "");
  EXPECT_GE(Clock::now() - start, kSameSignal);
}

TEST(StopSignal, OneOfAnotherKindDoesNotEndIt) {
  EXPECT_EXIT(
      {
        const StopSignal signals;
        ::raise(SIGTERM);
        const auto end = Clock::now() + kSameSignal + std::chrono::milliseconds(50);
        while (Clock::now() < end) ::raise(SIGINT);
        ::_exit(signals.received() == SIGTERM ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

}  // namespace stop_signal_test
}  // namespace lockstep
