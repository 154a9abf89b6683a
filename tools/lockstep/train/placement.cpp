#include "tools/lockstep/train/placement.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "lockstep/base/cores.h"
#include "lockstep/base/words.h"
#include "lockstep/train/threads.h"

namespace lockstep {
namespace {

/// How many of the host's ranks share this process's processors.
int sharers(const JobEnvironment& job, int local_size) {
  const int allowed = static_cast<int>(allowed_processors().size()), online = online_processors();
  const bool dealt_out = job.launcher == "slurm" || job.launcher == "openmpi";
  if (!dealt_out || allowed >= online) return local_size;
  return std::max(1, (local_size * allowed + online - 1) / online);
}

}  // namespace

ThreadChoice choose_threads(std::optional<int64_t> asked, std::optional<int64_t> omp, int cores,
                            int ranks) {
  if (asked) return {static_cast<int>(*asked), "--threads"};
  if (omp) return {static_cast<int>(*omp), "OMP_NUM_THREADS"};
  return {std::max(1, cores / std::max(1, ranks)),
          counted(cores, "core") + ", " + counted(ranks, "rank") + "; fewer for small models"};
}

int ranks_for(int cores) {
  constexpr int kMost = 8;
  const int cores_of_rank = (cores + kMost - 1) / kMost;
  return std::max(1, cores / std::max(1, cores_of_rank));
}

Placement choose_placement(std::optional<int64_t> threads, const std::string& bind_to,
                           const JobEnvironment& job) {
  const bool known = job.local_size > 0 || job.single_host || job.world_size == 1;
  const int local_size = job.local_size > 0 ? job.local_size : job.world_size;
  Placement placement;
  placement.threads =
      choose_threads(threads, users_omp_threads(), usable_cores(), sharers(job, local_size));
  if (!known && bind_to == "auto") {
    placement.binding.reason = "none: the launcher does not say how many ranks this host has";
    return placement;
  }
  const int local_rank = job.local_rank >= 0 ? job.local_rank : job.rank;
  placement.binding = launch::choose_binding({bind_to, local_rank, local_size});
  return placement;
}

bool threads_are_asked_for(std::optional<int64_t> threads) {
  return threads || users_omp_threads();
}

void apply(const Placement& placement) {
  if (!placement.binding.processors.empty()) set_allowed_processors(placement.binding.processors);
  at::set_num_threads(placement.threads.threads);
}

}  // namespace lockstep
