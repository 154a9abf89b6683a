#include "lockstep/launch/omp_waiting.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "lockstep/base/env.h"
#include "lockstep/launch/rank_environment.h"

namespace lockstep::launch {
namespace omp_waiting_test {

constexpr const char* kNames[] = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"};

/// Forgets what the test itself was started with.
class OmpWaiting : public testing::Test {
 protected:
  void SetUp() override { TearDown(); }
  void TearDown() override {
    for (const char* name : kNames) unsetenv(name);
  }
  static bool for_workers() {
    const auto env = rank_environment(RankLayout(), 0, "error.json");
    return std::any_of(env.begin(), env.end(),
                       [](const auto& variable) { return variable.first == "GOMP_SPINCOUNT"; });
  }
};

TEST_F(OmpWaiting, IsChosenForThisProcessAndForWorkers) {
  EXPECT_TRUE(for_workers());
  EXPECT_EQ(omp_waiting_text(), "as OpenMP does by itself");
  const auto chosen = omp_waiting();
  ASSERT_TRUE(chosen);
  choose_omp_waiting();
  EXPECT_EQ(env_string(chosen->first), chosen->second);
  EXPECT_THAT(omp_waiting_text(), testing::HasSubstr("Lockstep's choice"));
  std::map<std::string, std::string> of_another;
  forget_omp_waiting(of_another);
  EXPECT_EQ(of_another.at(chosen->first), "");
}

TEST_F(OmpWaiting, IsShorterOnABusyMachine) {
  EXPECT_EQ(others_running("0.20 0.18 0.12 1/80 11206"), 0);
  EXPECT_EQ(others_running("8.99 7.07 4.17 11/345 12"), 10);
  EXPECT_EQ(others_running("0.20 0.18 0.12 0/80 11206"), 0);
  for (const char* line : {"", "no such line", "1/", "/", " /", " x/y"}) {
    EXPECT_EQ(others_running(line), 0) << line;
  }
  EXPECT_STREQ(omp_spins(0, 2), "10000");
  EXPECT_STREQ(omp_spins(1, 2), "1000");
  EXPECT_STREQ(omp_spins(31, 64), "10000");
  EXPECT_STREQ(omp_spins(32, 64), "1000");
  EXPECT_EQ(omp_waiting(), omp_waiting()) << "chosen once";
}

TEST_F(OmpWaiting, WhatTheUserHasChosenStays) {
  for (const char* name : kNames) {
    setenv(name, "7", 1);
    EXPECT_FALSE(omp_waiting()) << name;
    EXPECT_FALSE(for_workers()) << name;
    choose_omp_waiting();
    EXPECT_EQ(env_string(name), "7");
    EXPECT_EQ(omp_waiting_text(), "by " + std::string(name) + "=7");
    std::map<std::string, std::string> of_another;
    forget_omp_waiting(of_another);
    EXPECT_TRUE(of_another.empty());
    TearDown();
  }
}

}  // namespace omp_waiting_test
}  // namespace lockstep::launch
