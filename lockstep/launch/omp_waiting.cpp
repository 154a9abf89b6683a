#include "lockstep/launch/omp_waiting.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <future>
#include <mutex>
#include <thread>

#include "lockstep/base/env.h"
#include "lockstep/base/text.h"

namespace lockstep::launch {
namespace {

constexpr const char* kVariable = "GOMP_SPINCOUNT";
constexpr const char* kLongSpins = "10000";  // some 0.5 ms
constexpr const char* kShortSpins = "1000";  // some 50 us

constexpr const char* kChoices[] = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"};

/// Whether the variable is set as we set it. A user who has chosen the same does not mind.
bool is_ours(const std::string& name) {
  const auto value = env_string(name);
  return name == kVariable && (value == kLongSpins || value == kShortSpins);
}

/// The least of a few looks: what runs for an instant only does not count.
int others_running_now() {
  int least = 0;
  for (int look = 0; look < 3; ++look) {
    if (look > 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
    std::ifstream file("/proc/loadavg");
    std::string line;
    std::getline(file, line);
    const int others = others_running(line);
    least = look == 0 ? others : std::min(least, others);
  }
  return least;
}

const char* spins_now() {
  return omp_spins(others_running_now(), static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN)));
}

/// Chosen once: the ranks that a process starts are no others.
const char* spins_of_this_process() {
  static const char* const spins = spins_now();
  return spins;
}

bool user_has_chosen() {
  return std::any_of(std::begin(kChoices), std::end(kChoices),
                     [](const char* name) { return env_string(name).has_value(); });
}

/// What `#pragma omp parallel` compiles to: the function, its argument, threads, flags.
using ParallelRegion = void (*)(void (*)(void*), void*, unsigned, unsigned);

/// One more thread than there are processors, in a team of its own that ends with the process.
void start_idle_team(ParallelRegion parallel_region) {
  std::promise<void> started;
  std::thread([&started, parallel_region] {
    const auto threads = static_cast<unsigned>(::sysconf(_SC_NPROCESSORS_ONLN)) + 1;
    parallel_region([](void*) {}, nullptr, threads, 0);
    started.set_value();
    while (true) ::pause();
  }).detach();
  started.get_future().wait();
}

}  // namespace

bool shorten_omp_waiting() {
  static std::mutex mutex;
  static bool shortened = false;
  const std::lock_guard lock(mutex);
  if (shortened) return true;
  const auto parallel_region =
      reinterpret_cast<ParallelRegion>(::dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  if (!parallel_region || user_has_chosen() || spins_now() != kShortSpins) return false;
  start_idle_team(parallel_region);
  return shortened = true;
}

int others_running(const std::string& loadavg) {
  const size_t end = loadavg.find('/');
  const size_t start = loadavg.rfind(' ', end);
  if (end == std::string::npos || start == std::string::npos) return 0;
  const auto running = parse_int(loadavg.substr(start + 1, end - start - 1));
  return running ? std::max(0, static_cast<int>(*running) - 1) : 0;
}

const char* omp_spins(int others, int processors) {
  return 2 * others >= processors ? kShortSpins : kLongSpins;
}

std::optional<std::pair<std::string, std::string>> omp_waiting() {
  if (user_has_chosen()) return std::nullopt;
  return std::pair{std::string(kVariable), std::string(spins_of_this_process())};
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
