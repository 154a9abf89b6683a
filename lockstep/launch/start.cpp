#include "lockstep/launch/start.h"

#include <ATen/Context.h>

#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/base/random.h"
#include "lockstep/base/settings.h"
#include "lockstep/comm/rendezvous/job_environment.h"
#include "lockstep/launch/last_words.h"
#include "lockstep/launch/spawn_ranks.h"
#include "lockstep/launch/start_ranks.h"

namespace lockstep {
namespace {

constexpr const char* kSeedKey = "lockstep.start/seed";

void expect_first_call(const std::string& name) {
  static std::atomic<bool> called{false};
  if (called.exchange(true)) {
    throw UsageError(
        name + " was called in a process that start or ElasticJob has made a rank already",
        "call it once, at the beginning of main; World::new_group makes further groups");
  }
}

/// The world is this process alone, whether a launcher has started it or a person.
bool is_alone(int nprocs, const SpawnOptions& options) {
  return nprocs == 1 && options.world_size <= 1 && options.first_rank <= 0 &&
         options.args.empty() && options.max_restarts == 0;
}

launch::SpawnCall spawn_call(const std::string& name) {
  launch::SpawnCall call;
  call.name = name;
  call.once = "call " + name + " once, at the beginning of main, and not beside spawn";
  call.stdout_ranks = {0};
  call.passes_input = true;
  call.prints_failure = true;
  return call;
}

/// None for a world of one.
std::optional<int> rank_in_messages() {
  const auto job = read_job_environment();
  return job.world_size > 1 ? std::optional<int>(job.rank) : std::nullopt;
}

/// Returns in a rank only, by which name messages call it. In the process that was started by hand
/// everything happens here.
std::optional<int> become_rank(int nprocs, const SpawnOptions& options,
                               const launch::SpawnCall& call) {
  int code = kExitSuccess;
  try {
    check_settings();
    if (is_alone(nprocs, options)) return rank_in_messages();
    std::fflush(stdout);  // What was printed before comes before what the ranks print.
    const auto role = launch::spawn_ranks(nprocs, options, call);
    if (role == launch::SpawnRole::worker) return rank_in_messages();
  } catch (const std::exception&) {
    code = launch::tell_failure(std::current_exception(), std::nullopt);
  }
  std::exit(code);
}

/// Rank 0's seed.
uint64_t common_seed(const World& world, uint64_t own) {
  Store store = world.store();
  const std::string text = store.get(kSeedKey);
  uint64_t seed = own;
  const auto* end = text.data() + text.size();
  if (std::from_chars(text.data(), end, seed).ptr != end || text.empty()) {
    throw UsageError("start: this rank has a seed, but rank 0 has none",
                     "give all ranks the same StartOptions");
  }
  return seed;
}

}  // namespace

namespace launch {

void start_ranks(int nprocs, const StartOptions& options, const std::string& name, bool recovers) {
  expect_first_call(name);
  SpawnOptions spawn = options.spawn;
  if (options.max_restarts != 0) spawn.max_restarts = options.max_restarts;
  SpawnCall call = spawn_call(name);
  call.recovers = recovers;
  end_in_words(become_rank(nprocs, spawn, call));
}

void seed_ranks(const World& world, const StartOptions& options) {
  const auto seed = options.seed;
  if (world.size() > 1 && world.rank() == 0) {
    Store store = world.store();
    store.set(kSeedKey, seed ? std::to_string(*seed) : "none");
  }
  if (seed) at::manual_seed(world.size() > 1 ? common_seed(world, *seed) : *seed);
}

}  // namespace launch

World start(int nprocs, const StartOptions& options) {
  launch::start_ranks(nprocs, options, "start", false);
  World world = init(options.init);
  launch::seed_ranks(world, options);
  return world;
}

at::Generator rank_generator(const World& world, std::optional<uint64_t> seed) {
  at::Generator common = at::globalContext().defaultGenerator(world.device());
  const auto copy = [&] {
    const std::lock_guard lock(common.mutex());
    return common.clone();
  };
  at::Generator own = copy();
  // LibTorch's generator of the CPU takes the lower 32 bits. Counted on from one number, those of
  // all ranks differ. The seed is mixed, as the default generator has the seed itself.
  const auto first = static_cast<uint32_t>(KeyedRandom(seed.value_or(own.current_seed())).next());
  own.set_current_seed(first + static_cast<uint32_t>(world.rank()));
  return own;
}

}  // namespace lockstep
