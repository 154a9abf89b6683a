#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/comm/rendezvous/job_environment.h"
#include "lockstep/launch/binding.h"

namespace lockstep {

struct ThreadChoice {
  int threads = 1;
  std::string reason;  ///< "--threads", "2 cores, 1 rank", ...
};

/// LibTorch's threads for the operations of a rank: what was asked for by --threads, else by
/// OMP_NUM_THREADS (see users_omp_threads), else the cores in equal parts for so many ranks, and
/// never none. `cores` are whole ones that this process may use, within the container's quota. A
/// second hardware thread of a core does not count, as it adds little to arithmetic.
ThreadChoice choose_threads(std::optional<int64_t> asked, std::optional<int64_t> omp, int cores,
                            int ranks);

/// How many ranks --devices auto starts on a host without GPUs: one for each core, but at most 8.
/// Where there are more cores each rank gets the same number of them, and threads use it. More
/// ranks would make larger steps, by --batch-size, and longer all-reduces.
int ranks_for(int cores);

/// Where and with how many threads a rank computes.
struct Placement {
  ThreadChoice threads;
  launch::Binding binding;
};

/// For this process, by its environment and its job. Where the launcher does not say how many ranks
/// this host has, all are taken to be here, and nothing is bound. A launcher that binds its ranks
/// itself (Slurm, mpirun) may have narrowed the processors. Each rank's are then taken to be shared
/// by as many ranks as their part of the machine calls for. Throws UsageError. See choose_binding.
Placement choose_placement(std::optional<int64_t> threads, const std::string& bind_to,
                           const JobEnvironment& job);

/// Whether --threads or a user's OMP_NUM_THREADS has decided.
bool threads_are_asked_for(std::optional<int64_t> threads);

/// Applies it to the calling thread and all that it starts from here on, so before anything starts
/// threads: before init().
void apply(const Placement& placement);

}  // namespace lockstep
