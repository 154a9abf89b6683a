#include "lockstep/launch/attempts.h"

#include <gtest/gtest.h>

#include <csignal>
#include <random>

namespace lockstep::launch {
namespace attempts_test {

AttemptEnd killed(const std::string& line = "rank 1 was killed") {
  return {.line = line, .exit_code = 128 + SIGKILL};
}

AttemptEnd early(const std::string& said, int exit_code = 1) {
  return {.line = said, .exit_code = exit_code, .before_first_step = true, .said = said};
}

/// The verdict after all of these ends, of which each but the last was followed by a restart.
Decision after(int max_restarts, const std::vector<AttemptEnd>& ends) {
  Decision decision{Verdict::restart, {.max_restarts = max_restarts}};
  for (const auto& end : ends) {
    EXPECT_EQ(decision.verdict, Verdict::restart);
    decision = decide(decision.attempts, end);
  }
  return decision;
}

TEST(Attempts, SuccessIsTheEnd) {
  EXPECT_EQ(after(3, {{.succeeded = true}}).verdict, Verdict::done);
  const auto second = after(3, {killed(), {.succeeded = true}});
  EXPECT_EQ(second.verdict, Verdict::done);
  EXPECT_EQ(second.attempts.failures.size(), 1u);
}

TEST(Attempts, AsManyRestartsAsAsked) {
  EXPECT_EQ(after(0, {killed()}).verdict, Verdict::give_up);
  EXPECT_TRUE(after(0, {killed()}).hint.empty()) << "nobody asked for restarts";
  EXPECT_EQ(after(2, {killed(), killed()}).verdict, Verdict::restart);
  const auto last = after(2, {killed("first"), killed("second"), killed("third")});
  EXPECT_EQ(last.verdict, Verdict::give_up);
  EXPECT_EQ(last.attempts.failures, (std::vector<std::string>{"first", "second", "third"}));
  EXPECT_FALSE(last.hint.empty());
}

TEST(Attempts, WhatCannotSucceedIsNotTriedAgain) {
  EXPECT_EQ(after(3, {{.line = "missing", .exit_code = 127, .executed = false}}).verdict,
            Verdict::give_up);
  EXPECT_EQ(after(3, {{.line = "usage", .exit_code = 2}}).verdict, Verdict::give_up);
  EXPECT_EQ(after(3, {killed(), {.line = "usage", .exit_code = 2}}).verdict, Verdict::give_up);
}

TEST(Attempts, TheSameFailureTwiceBeforeTheFirstStep) {
  const auto first = early("rank 1 (process 4711) found no data");
  const auto same = early("rank 0 (process 99) found no data");
  EXPECT_EQ(after(5, {first}).verdict, Verdict::restart);
  EXPECT_EQ(after(5, {first, same}).verdict, Verdict::give_up);
  EXPECT_EQ(after(5, {first, killed(), same}).verdict, Verdict::restart) << "not in a row";
  EXPECT_EQ(after(5, {first, early("another")}).verdict, Verdict::restart);
  EXPECT_EQ(after(5, {first, early(first.said, 3)}).verdict, Verdict::restart);
  auto later = same;
  later.before_first_step = false;
  EXPECT_EQ(after(5, {first, later}).verdict, Verdict::restart) << "it trained meanwhile";
  EXPECT_EQ(after(5, {early(""), early("")}).verdict, Verdict::restart) << "it said nothing";
}

TEST(Attempts, ASignalEndsTheJobWhereItWouldHaveGoneOn) {
  auto signalled = killed();
  signalled.signal = SIGTERM;
  EXPECT_EQ(after(1, {signalled}).verdict, Verdict::interrupted);
  EXPECT_EQ(after(0, {signalled}).verdict, Verdict::give_up) << "the failure is what ended it";
}

/// Whatever happens, a job makes at most 1 + max_restarts attempts, and forgets no failure.
TEST(Attempts, AnyOrderEnds) {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const int most = static_cast<int>(random() % 5);
    Decision decision{Verdict::restart, {.max_restarts = most}};
    int attempts = 0;
    while (decision.verdict == Verdict::restart) {
      AttemptEnd end = random() % 2 ? killed() : early(random() % 2 ? "a" : "b");
      end.succeeded = random() % 8 == 0;
      if (random() % 8 == 0) end.exit_code = 2;
      decision = decide(decision.attempts, end);
      ++attempts;
      EXPECT_EQ(decision.attempts.current(), attempts - (end.succeeded ? 1 : 0));
    }
    EXPECT_LE(attempts, 1 + most);
  }
}

}  // namespace attempts_test
}  // namespace lockstep::launch
