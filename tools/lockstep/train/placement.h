#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/comm/rendezvous/job_environment.h"
#include "lockstep/launch/binding.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

/// What a number of threads depends on.
struct ThreadRequest {
  std::optional<int64_t> asked;       ///< --threads.
  std::optional<int64_t> omp;         ///< OMP_NUM_THREADS.
  bool omp_is_the_launchers = false;  ///< `lockstep run` or `spawn` set it because nobody had.
  /// Whole cores that this process may use, within the container's quota. A second hardware thread
  /// of a core does not count, as it adds little to arithmetic.
  int cores = 1;
  int local_size = 1;  ///< Ranks that share them.
};

struct ThreadChoice {
  int threads = 1;
  std::string reason;  ///< "--threads", "2 cores, 1 rank", ...
};

/// LibTorch's threads for the operations of a rank: what was asked for, else OMP_NUM_THREADS, else
/// the cores in equal parts, at least 1. Our own launcher puts 1 into OMP_NUM_THREADS for the sake
/// of programs that know nothing better: this 1 does not count. That of torchrun does, as it cannot
/// be told from a user's.
ThreadChoice choose_threads(const ThreadRequest& request);

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

/// How many of `threads` a model should use where nobody has asked for a number. A step of little
/// arithmetic gains little on several threads. It loses much where the machine has other work, as
/// threads wait for each other by spinning. The MLP with 109,386 parameters at batch 32 takes 0.9
/// of its time with 2 threads on 2 idle cores. It takes twice its time when those are shared with
/// others. At batch 128 it gains in both cases. So a thread is worth 5 million multiplications
/// forward. Models with convolutions get all threads, as their parameters do not say how often they
/// are used.
int threads_worth_using(int threads, const torch::nn::Module& module, int64_t batch_size);

/// Applies it to the calling thread and all that it starts from here on, so before anything starts
/// threads: before init().
void apply(const Placement& placement);

}  // namespace lockstep
