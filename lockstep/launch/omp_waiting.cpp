#include "lockstep/launch/omp_waiting.h"

#include <cstdlib>

#include "lockstep/base/env.h"

namespace lockstep::launch {
namespace {

constexpr const char* kVariable = "GOMP_SPINCOUNT";
/// Turns of the loop that waits, some 50 us: longer than the serial code between the parallel
/// regions of a step, and far shorter than the time slice of another program.
constexpr const char* kSpins = "1000";

constexpr const char* kChoices[] = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"};

/// Whether the variable is set as we set it. A user who has chosen the same does not mind.
bool is_ours(const std::string& name) {
  return name == kVariable && env_string(name) == kSpins;
}

}  // namespace

std::optional<std::pair<std::string, std::string>> omp_waiting() {
  for (const char* name : kChoices) {
    if (env_string(name)) return std::nullopt;
  }
  return std::pair{std::string(kVariable), std::string(kSpins)};
}

void choose_omp_waiting() {
  if (const auto chosen = omp_waiting()) ::setenv(chosen->first.c_str(), chosen->second.c_str(), 1);
}

void forget_omp_waiting(std::map<std::string, std::string>& environment) {
  if (is_ours(kVariable)) environment[kVariable] = "";
}

std::string omp_waiting_text() {
  for (const char* name : kChoices) {
    const auto value = env_string(name);
    if (!value) continue;
    const std::string text = std::string(name) + "=" + *value;
    return is_ours(name) ? "they spin shortly, then sleep (" + text + ", Lockstep's choice)"
                         : "by " + text;
  }
  return "as OpenMP does by itself";
}

}  // namespace lockstep::launch
