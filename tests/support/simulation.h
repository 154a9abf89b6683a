#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "lockstep/elastic/agent_events.h"

namespace lockstep::elastic {

/// What a simulated job is like. All that happens in it follows from this.
struct SimulationPlan {
  uint64_t seed = 0;
  AgentOptions options = {};  ///< Of all agents, but for what names them.
  int agents = 1;             ///< At the start.
  bool node_ranks = false;
  int faults = 0;
  bool splits = false;  ///< All hosts of a generation lose the registry, and others stand by.
  std::chrono::milliseconds arrival{0};     ///< The agents start within this time.
  std::chrono::milliseconds fault_time{0};  ///< In which the faults come. Then all is mended.
  std::chrono::milliseconds work{1'000};    ///< Of a generation from its start to its success.
  std::chrono::microseconds service{0};     ///< The registry's work at a message.
  bool until_running = false;               ///< Ends as soon as a generation runs.
  bool traces = false;                      ///< Prints each step.
};

struct SimulationResult {
  uint64_t steps = 0;     ///< Events that agents took.
  uint64_t messages = 0;  ///< Between agents and the registry, both ways, and
  uint64_t bytes = 0;     ///< their values.
  int64_t generations = 0;
  int restarts = 0;
  JobEnd::Kind end = JobEnd::Kind::none;
  std::chrono::milliseconds time{};  ///< Simulated.
};

/// A rule of the design was broken.
class BrokenRule : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A job with a random size, limits and faults.
SimulationPlan random_plan(uint64_t seed);
/// Runs agents against a simulated registry, network and workers, and checks the rules after every
/// step. Throws BrokenRule.
SimulationResult simulate(const SimulationPlan& plan);

}  // namespace lockstep::elastic
