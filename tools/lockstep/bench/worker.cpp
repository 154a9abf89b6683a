#include "tools/lockstep/bench/worker.h"

#include <ATen/ATen.h>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/comm/rendezvous/job_environment.h"
#include "lockstep/comm/world.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/loader.h"
#include "tools/lockstep/bench/bench.h"
#include "tools/lockstep/bench/scaling.h"
#include "tools/lockstep/train/placement.h"

namespace lockstep::tool {
namespace {

using PlainJson = nlohmann::json;

PlainJson run_loader(const PlainJson& config) {
  DatasetOptions options;
  options.data_dir = config.at("folder").get<std::string>();
  const auto dataset = load_dataset("mnist", options).train;
  LoaderOptions loader_options;
  loader_options.batch_size = config.at("batch_size");
  loader_options.num_workers = config.at("workers");
  DataLoader loader(dataset, DistributedSampler({.dataset_size = dataset.size()}),
                    {lockstep::normalize()}, loader_options);
  const auto samples_per_second = [&](int64_t epoch, int64_t batches) {
    const auto start = BenchClock::now();
    int64_t samples = 0;
    for (const auto& batch : loader.epoch(epoch)) {
      if (batch.index >= batches) break;
      samples += batch.size();
    }
    return static_cast<double>(samples) / seconds_since(start);
  };
  samples_per_second(0, config.at("warmup"));
  std::vector<double> rates;
  for (int64_t i = 0; i < config.at("epochs").get<int64_t>(); ++i) {
    rates.push_back(samples_per_second(1 + i, config.at("batches")));
  }
  return {{"samples_per_s", median(std::move(rates))}};
}

/// Meets the others, sums one number, and ends.
void run_launch(const PlainJson& config) {
  const World world = init({.backend = config.at("backend")});
  auto one = at::ones({1}, world.device());
  world.group().all_reduce(one);
  if (one.item<double>() != world.size()) {
    throw CommError("an all-reduce of ones over " + std::to_string(world.size()) + " ranks gave " +
                    std::to_string(one.item<double>()));
  }
}

int64_t own_rank() {
  return env_int("RANK").value_or(env_int("OMPI_COMM_WORLD_RANK").value_or(0));
}

/// The runner has started all ranks on this host; they meet by a file.
JobEnvironment job_of(const PlainJson& config) {
  JobEnvironment job;
  job.rank = job.local_rank = static_cast<int>(own_rank());
  job.world_size = job.local_size = config.at("ranks");
  job.single_host = true;
  return job;
}

}  // namespace

World join_group(const PlainJson& config) {
  // Threads are those of OMP_NUM_THREADS, which the runner sets.
  apply(choose_placement({}, config.at("bind_to"), job_of(config)));
  InitOptions options;
  options.backend = config.at("backend");
  options.init_method = config.at("init_method");
  return init(options);
}

int bench_worker(const std::string& text) {
  const PlainJson config = PlainJson::parse(text);
  const std::string kind = config.at("kind");
  PlainJson result;
  if (kind == "step") {
    result = bench_step_worker(config);
  } else if (kind == "scaling") {
    result = bench_scaling_worker(config);
  } else if (kind == "memory") {
    result = bench_memory_worker(config);
  } else if (kind == "allreduce") {
    result = bench_allreduce_worker(config);
  } else if (kind == "rpc") {
    result = bench_rpc_worker(config);
  } else if (kind == "data-parallel") {
    result = bench_data_parallel_worker(config);
  } else if (kind == "loader") {
    result = run_loader(config);
  } else if (kind == "launch") {
    run_launch(config);
    return 0;
  } else {
    throw UsageError("unknown kind of benchmark '" + kind + "'");
  }
  if (own_rank() == 0) {
    write_file_atomically(config.at("result").get<std::string>(), result.dump());
  }
  return 0;
}

}  // namespace lockstep::tool
