#include "tests/support/simulation.h"

#include "lockstep/base/random.h"
#include "tests/support/simulated_world.h"

namespace lockstep::elastic {

using std::chrono::milliseconds;

SimulationPlan random_plan(uint64_t seed) {
  KeyedRandom random(seed, 1);
  const auto below = [&](int bound) { return static_cast<int>(random.below(bound)); };
  SimulationPlan plan;
  plan.seed = seed;
  auto& options = plan.options;
  options.min_agents = 1 + below(3);
  options.max_agents = options.min_agents + (below(3) == 0 ? 0 : below(3));
  options.max_restarts = below(5);
  options.embedded_registry = below(3) == 0;
  options.join_timeout = std::chrono::seconds(40);
  options.contact_limit = std::chrono::seconds(6);
  options.contact_margin = std::chrono::seconds(8);
  plan.agents = options.min_agents + below(3);
  plan.node_ranks = below(5) == 0;
  plan.faults = below(4) == 0 ? 30 : below(12);
  plan.arrival = milliseconds(below(2) == 0 ? 100 : 4'000);
  plan.fault_time = milliseconds(1'000 + below(20'000));
  plan.work = milliseconds(100 + below(8'000));
  if (below(8) != 0) return plan;
  plan.splits = true;
  options.embedded_registry = false;
  plan.agents = options.max_agents + options.min_agents + below(2);
  plan.arrival = milliseconds(100);
  plan.work = plan.fault_time = milliseconds(40'000);
  plan.faults = below(4);
  return plan;
}

SimulationResult simulate(const SimulationPlan& plan) {
  return SimulatedWorld(plan).run();
}

}  // namespace lockstep::elastic
