#include "tools/lockstep/bench/worker.h"

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/rendezvous/job_environment.h"
#include "tools/lockstep/train/placement.h"

namespace lockstep::tool {
namespace {

int64_t own_rank() {
  return env_int("RANK").value_or(env_int("OMPI_COMM_WORLD_RANK").value_or(0));
}

}  // namespace

World join_group(const nlohmann::json& config) {
  // The runner has started all ranks on this host; they meet by a file.
  JobEnvironment job;
  job.rank = job.local_rank = static_cast<int>(own_rank());
  job.world_size = job.local_size = config.at("ranks");
  job.single_host = true;
  // Threads are those of OMP_NUM_THREADS, which the runner sets.
  apply(choose_placement({}, config.at("bind_to"), job));
  return init({.backend = config.at("backend"), .init_method = config.at("init_method")});
}

int bench_worker(const std::string& text) {
  const auto config = nlohmann::json::parse(text);
  const std::string kind = config.at("kind");
  for (const Bench& bench : benches()) {
    if (bench.name != kind || !bench.worker) continue;
    const nlohmann::json result = bench.worker(config);
    if (own_rank() == 0 && !result.is_null()) {
      write_file_atomically(config.at("result").get<std::string>(), result.dump());
    }
    return 0;
  }
  throw UsageError("unknown kind of benchmark '" + kind + "'");
}

}  // namespace lockstep::tool
