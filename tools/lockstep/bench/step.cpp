#include <sys/resource.h>

#include "lockstep/train/step_profiler.h"
#include "tools/lockstep/bench/step_bench.h"
#include "tools/lockstep/bench/worker.h"

namespace lockstep::tool {
namespace {

using PlainJson = nlohmann::json;

PlainJson run_profile(const PlainJson& config, const World& world, StepBench& bench) {
  constexpr int64_t kBatches = 16;  // Full ones: a short one would be another step.
  DataLoader loader = bench.make_loader(bench.random_samples(kBatches * bench.batch_size()));
  const auto run = [&](const StepProfilerOptions& options, int64_t steps) {
    StepProfiler profiler(world.group(), options);
    for (int64_t i = 0; i < steps; ++i) bench.profiled_step(profiler, loader);
    return profiler.finish();
  };
  run({}, config.at("warmup"));
  StepProfilerOptions options;
  options.operations = config.at("operations");
  const StepProfile own = run(options, config.at("steps"));
  std::vector<StepBreakdown> steps = analyse(own).steps;
  PlainJson result = {{"us_per_step", typical_step(steps).step},
                      {"backend", world.group().backend()},
                      {"profiles", PlainJson::array()}};
  for (auto& profile : world.group().gather_object(to_object(own), 0)) {
    result["profiles"].push_back(std::move(profile));
  }
  return result;
}

}  // namespace

PlainJson bench_step_worker(const PlainJson& config) {
  const World world = join_group(config);
  StepBench bench(config, world);
  if (config.value("profile", false)) return run_profile(config, world, bench);
  bench.draw_batch();
  return {
      {"us_per_step", median_us([&] { bench.step(); }, config.at("warmup"), config.at("steps"))}};
}

PlainJson bench_memory_worker(const PlainJson& config) {
  const World world = join_group(config);
  StepBench bench(config, world);
  bench.draw_batch();
  StateBytes bytes;
  // An optimizer has its state after the first step.
  for (int64_t i = 0; i < config.at("steps").get<int64_t>(); ++i) bytes = bench.measured_step();
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const PlainJson own = {{"rank", world.rank()},
                         {"parameters", bench.parameters()},
                         {"state_bytes", bytes.total()},
                         {"parameter_bytes", bytes.parameters},
                         {"gradient_bytes", bytes.gradients},
                         {"optimizer_bytes", bytes.optimizer},
                         {"peak_rss_bytes", usage.ru_maxrss * 1024}};
  return {{"ranks", world.group().gather_object(own, 0)}};
}

}  // namespace lockstep::tool
