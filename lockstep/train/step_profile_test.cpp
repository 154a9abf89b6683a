#include "lockstep/train/step_profiler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <tuple>

#include "lockstep/base/error.h"
#include "lockstep/base/random.h"

namespace lockstep {
namespace step_profile_test {

using Json = nlohmann::ordered_json;

CallSpan call(int64_t begin, int64_t returned, int64_t end) {
  return {"all_reduce", 8, {begin, end}, returned};
}

/// One step of 10 us: data 1, forward 2, backward 4 (from 4 to 8), optimizer 1, and gaps.
StepProfile one_step() {
  StepProfile profile;
  profile.steps = {{0, 10'000}};
  profile.parts = {{StepPart::data, {0, 1'000}},
                   {StepPart::forward, {1'500, 3'500}},
                   {StepPart::backward, {4'000, 8'000}},
                   {StepPart::optimizer, {8'500, 9'500}}};
  return profile;
}

double part(const StepBreakdown& step, StepPart which) {
  return step.parts[static_cast<size_t>(which)];
}

double sum(const StepBreakdown& step) {
  return std::accumulate(step.parts.begin(), step.parts.end(), step.exposed + step.rest);
}

TEST(StepProfile, WithoutCommunication) {
  const auto step = analyse(one_step()).steps.at(0);
  EXPECT_DOUBLE_EQ(part(step, StepPart::data), 1);
  EXPECT_DOUBLE_EQ(part(step, StepPart::forward), 2);
  EXPECT_DOUBLE_EQ(part(step, StepPart::backward), 4);
  EXPECT_DOUBLE_EQ(part(step, StepPart::optimizer), 1);
  EXPECT_DOUBLE_EQ(step.rest, 2);
  EXPECT_DOUBLE_EQ(step.step, 10);
  EXPECT_EQ(step.exposed, 0);
  EXPECT_EQ(step.hidden, 0);
}

TEST(StepProfile, ACallInTheCallersThreadIsExposed) {
  auto profile = one_step();
  profile.calls = {call(5'000, 6'000, 6'000), call(7'000, 7'900, 7'900)};
  const auto analysis = analyse(profile);
  EXPECT_DOUBLE_EQ(analysis.steps[0].exposed, 1.9);
  EXPECT_DOUBLE_EQ(analysis.steps[0].hidden, 0);
  EXPECT_DOUBLE_EQ(part(analysis.steps[0], StepPart::backward), 2.1);
  EXPECT_EQ(analysis.waits.size(), 2u);
}

TEST(StepProfile, ACallBesideBackwardIsHiddenUntilBackwardWaits) {
  auto profile = one_step();
  // The first ends while backward computes; the second began with the last gradient.
  profile.calls = {call(5'000, 5'100, 6'500), call(7'000, 7'100, 7'800)};
  const auto step = analyse(profile).steps.at(0);
  EXPECT_DOUBLE_EQ(step.exposed, 0.1 + 0.8);
  EXPECT_DOUBLE_EQ(step.hidden, 1.4);
  EXPECT_DOUBLE_EQ(part(step, StepPart::backward), 4 - 0.9);
  EXPECT_NEAR(sum(step), step.step, 1e-9);
}

TEST(StepProfile, ALongFirstCallCountsOnceWhileASecondRuns) {
  auto profile = one_step();
  profile.calls = {call(5'000, 5'000, 7'900), call(6'000, 6'000, 7'000)};
  const auto step = analyse(profile).steps.at(0);
  EXPECT_DOUBLE_EQ(step.hidden, 1);     // 5,000 to 6,000
  EXPECT_DOUBLE_EQ(step.exposed, 1.9);  // 6,000 to 7,900
}

TEST(StepProfile, WhatOutlivesItsPartIsHiddenInTheNext) {
  auto profile = one_step();
  profile.calls = {call(7'000, 7'000, 9'000)};
  const auto step = analyse(profile).steps.at(0);
  EXPECT_DOUBLE_EQ(step.exposed, 1);  // to backward's end
  EXPECT_DOUBLE_EQ(step.hidden, 1);
}

TEST(StepProfile, ACallOutsideOfAllPartsIsWaitedFor) {
  auto profile = one_step();
  profile.calls = {call(3'600, 3'700, 3'900)};
  const auto step = analyse(profile).steps.at(0);
  EXPECT_DOUBLE_EQ(step.exposed, 0.3);
  EXPECT_DOUBLE_EQ(step.rest, 1.7);
}

/// Steps with parts, gaps and calls of all kinds: some come back at once, some at their end.
StepProfile random_profile(uint64_t seed, int steps = 40) {
  KeyedRandom random(seed);
  StepProfile profile;
  int64_t time = 1'000'000'000;
  for (int i = 0; i < steps; ++i) {
    const int64_t begin = time;
    for (size_t which = 0; which < kStepParts; ++which) {
      time += static_cast<int64_t>(random.below(300));
      const int64_t part_begin = time;
      time += 1 + static_cast<int64_t>(random.below(5'000));
      for (uint64_t calls = random.below(4); calls > 0; --calls) {
        const int64_t start =
            part_begin +
            static_cast<int64_t>(random.below(static_cast<uint64_t>(time - part_begin)));
        const auto length = static_cast<int64_t>(random.below(4'000));
        const int64_t returned = start + (random.below(2) ? length : length / 10);
        profile.calls.push_back(call(start, std::min(returned, time), start + length));
      }
      profile.parts.push_back({static_cast<StepPart>(which), {part_begin, time}});
    }
    time += static_cast<int64_t>(random.below(300));
    profile.steps.push_back({begin, time});
    time += static_cast<int64_t>(random.below(100));
  }
  return profile;
}

TEST(StepProfile, PartsAddUpToTheStep) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const auto steps = analyse(random_profile(seed)).steps;
    ASSERT_EQ(steps.size(), 40u);
    for (const auto& step : steps) {
      EXPECT_NEAR(sum(step), step.step, 1e-6) << "seed " << seed;
      EXPECT_GE(step.exposed, 0) << "seed " << seed;
      EXPECT_GE(step.hidden, -1e-9) << "seed " << seed;
      EXPECT_GE(step.rest, -1e-9) << "seed " << seed;
      for (const double time : step.parts) EXPECT_GE(time, -1e-9) << "seed " << seed;
    }
    const auto typical = typical_step(steps);
    EXPECT_NEAR(sum(typical), typical.step, 1e-6) << "seed " << seed;
  }
}

TEST(StepProfile, ATypicalStepIsNotMovedByAFewThatWereDisturbed) {
  std::vector<StepBreakdown> steps(8);
  for (auto& step : steps) step.step = step.rest = 10;
  steps[3].step = steps[3].rest = 1e6;
  EXPECT_DOUBLE_EQ(typical_step(steps).step, 10);
  EXPECT_DOUBLE_EQ(typical_step({steps[3]}).step, 1e6);
  EXPECT_THROW(typical_step({}), UsageError);
}

TEST(StepProfile, OperationsCostWhatThoseWithinThemDoNot) {
  auto profile = one_step();
  profile.operations = {{"inner", 0, {200, 500}},
                        {"outer", 0, {0, 1'000}},
                        {"inner", 0, {600, 700}},
                        {"other", 1, {300, 900}}};
  const auto costs = operation_costs(profile);
  ASSERT_EQ(costs.size(), 3u);
  EXPECT_EQ(costs[0].name, "other");  // another thread's: of the same time and yet not within
  EXPECT_DOUBLE_EQ(costs[0].self_us, 0.6);
  EXPECT_EQ(costs[1].name, "outer");
  EXPECT_DOUBLE_EQ(costs[1].self_us, 0.6);
  EXPECT_EQ(costs[2].calls, 2);
  EXPECT_DOUBLE_EQ(costs[2].self_us, 0.4);
}

TEST(StepProfile, TravelsAsAnObject) {
  auto profile = random_profile(7, 3);
  profile.rank = 5;
  profile.operations = {{"aten::add", 1, {2, 3}}};
  const auto copy =
      profile_from(nlohmann::json::from_cbor(nlohmann::json::to_cbor(to_object(profile))));
  EXPECT_EQ(to_object(copy), to_object(profile));
  EXPECT_EQ(copy.rank, 5);
  EXPECT_EQ(copy.parts.size(), 12u);
  EXPECT_EQ(copy.operations[0].name, "aten::add");
}

/// Sums of durations by rank, category and name; fails where two events of a row overlap without
/// one lying within the other.
std::map<std::tuple<int, std::string, std::string>, double> check_and_sum(const Json& trace) {
  std::map<std::tuple<int, std::string, std::string>, double> sums;
  std::map<std::pair<int, int>, std::vector<std::pair<double, double>>> rows;
  std::map<std::pair<int, int>, std::string> names;
  for (const auto& event : trace.at("traceEvents")) {
    const std::pair<int, int> row{event.at("pid"), event.at("tid")};
    if (event.at("ph") == "M") {
      if (event.at("name") == "thread_name") names[row] = event.at("args").at("name");
      continue;
    }
    EXPECT_EQ(event.at("ph"), "X");
    const double begin = event.at("ts"), length = event.at("dur");
    EXPECT_GE(length, 0);
    rows[row].push_back({begin, begin + length});
    sums[{event.at("pid"), event.at("cat"), event.at("name")}] += length;
  }
  for (auto& [row, events] : rows) {
    EXPECT_FALSE(names[row].empty()) << "row " << row.second;
    std::sort(events.begin(), events.end(), [](const auto& a, const auto& b) {
      return a.first != b.first ? a.first < b.first : a.second > b.second;
    });
    std::vector<double> ends;
    for (const auto& [begin, end] : events) {
      while (!ends.empty() && ends.back() <= begin + 1e-3) ends.pop_back();
      if (!ends.empty()) {
        EXPECT_LE(end, ends.back() + 1e-3) << names[row] << " at " << begin;
      }
      ends.push_back(end);
    }
  }
  return sums;
}

TEST(ChromeTrace, NestsAndAgreesWithTheBreakdown) {
  for (uint64_t seed = 100; seed < 120; ++seed) {
    std::vector<StepProfile> ranks = {random_profile(seed), random_profile(seed + 1000)};
    ranks[1].rank = 1;
    const Json trace = Json::parse(chrome_trace(ranks, {{"model", "mlp"}}).dump());
    EXPECT_EQ(trace.at("otherData").at("model"), "mlp");
    auto sums = check_and_sum(trace);
    for (const auto& rank : ranks) {
      double exposed = 0, whole = 0, hidden = 0;
      std::array<double, kStepParts> parts{};
      for (const auto& step : analyse(rank).steps) {
        exposed += step.exposed;
        hidden += step.hidden;
        whole += step.step;
        for (size_t i = 0; i < kStepParts; ++i) parts[i] += step.parts[i];
      }
      EXPECT_GT(hidden, 0);
      EXPECT_NEAR((sums[{rank.rank, "wait", "wait for communication"}]), exposed, 0.01) << seed;
      double steps = 0;
      for (const auto& [key, time] : sums) {
        if (std::get<0>(key) == rank.rank && std::get<1>(key) == "step") steps += time;
      }
      EXPECT_NEAR(steps, whole, 0.01) << seed;
      for (size_t i = 0; i < kStepParts; ++i) {
        const double shown = sums[{rank.rank, "part", step_part_name(static_cast<StepPart>(i))}];
        EXPECT_GE(shown + 1e-6, parts[i]) << "the waits lie within";
      }
    }
  }
}

TEST(ChromeTrace, OperationsHaveRowsOfTheirOwn) {
  auto profile = one_step();
  profile.operations = {{"aten::add", 0, {100, 200}}, {"MulBackward0", 1, {5'000, 6'000}}};
  const Json trace = chrome_trace({profile}, Json::object());
  const auto sums = check_and_sum(trace);
  EXPECT_NEAR((sums.at({0, "operation", "MulBackward0"})), 1, 1e-9);
  std::vector<std::string> rows;
  for (const auto& event : trace["traceEvents"]) {
    if (event["name"] == "thread_name") rows.push_back(event["args"]["name"]);
  }
  EXPECT_EQ(rows, (std::vector<std::string>{"main thread", "operations", "operations, thread 2"}));
}

}  // namespace step_profile_test
}  // namespace lockstep
