#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <vector>

#include "lockstep/base/env.h"
#include "tests/support/simulation.h"

namespace lockstep::elastic {
namespace {

/// LOCKSTEP_SIM_SEED runs one seed alone, with all its steps.
TEST(ElasticSimulation, RandomJobsKeepTheRules) {
  if (const auto seed = env_int("LOCKSTEP_SIM_SEED", 0)) {
    auto plan = random_plan(static_cast<uint64_t>(*seed));
    plan.traces = true;
    ASSERT_NO_THROW(simulate(plan));
    return;
  }
  const bool is_long = env_flag("LOCKSTEP_LONG_TESTS");
  uint64_t steps = 0, restarts = 0, generations = 0, seeds = 0, failures = 0;
  int ends[4] = {};
  for (; failures < 20 && (is_long ? steps < 10'000'000 : seeds < 10'000); ++seeds) {
    try {
      const auto result = simulate(random_plan(seeds));
      steps += result.steps;
      restarts += static_cast<uint64_t>(result.restarts);
      generations += static_cast<uint64_t>(result.generations);
      ++ends[static_cast<int>(result.end)];
    } catch (const BrokenRule& rule) {
      ++failures;
      ADD_FAILURE() << rule.what() << "\nLOCKSTEP_SIM_SEED=" << seeds << " shows its steps";
    }
  }
  std::printf(
      "%lu seeds, %lu steps, %lu generations, %lu restarts; %d jobs without an end, %d "
      "succeeded, %d failed, %d interrupted\n",
      seeds, steps, generations, restarts, ends[0], ends[1], ends[2], ends[3]);
}

SimulationPlan large_plan(int agents) {
  SimulationPlan plan;
  plan.seed = 1;
  plan.agents = agents;
  plan.options.min_agents = plan.options.max_agents = agents;
  plan.arrival = std::chrono::seconds(1);
  plan.until_running = true;
  plan.service = std::chrono::microseconds(20);
  if (agents >= 10'000) plan.options.keep_alive = std::chrono::seconds(10);
  return plan;
}

/// Messages grow linearly with the number of agents.
TEST(ElasticSimulation, ManyAgents) {
  const std::vector<int> sizes = env_flag("LOCKSTEP_LONG_TESTS")
                                     ? std::vector<int>{10, 100, 1'000, 10'000}
                                     : std::vector<int>{10, 100};
  std::printf("agents  seconds until all run  messages  per agent  MB of values\n");
  for (const int agents : sizes) {
    const auto result = simulate(large_plan(agents));
    const double per_agent = static_cast<double>(result.messages) / agents;
    std::printf("%6d  %21.2f  %8lu  %9.1f  %12.2f\n", agents,
                std::chrono::duration<double>(result.time).count(), result.messages, per_agent,
                static_cast<double>(result.bytes) / 1e6);
    EXPECT_EQ(result.generations, 1);
    EXPECT_LT(per_agent, 40);
  }
}

}  // namespace
}  // namespace lockstep::elastic
