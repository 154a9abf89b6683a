#pragma once

#include <cstdint>
#include <optional>

namespace torch::nn {
class Module;
}

namespace lockstep {

/// The number of threads in OMP_NUM_THREADS, of its first level. None where it is unset or no
/// number. `lockstep run`, `spawn` and `start` put 1 there for programs that know nothing better;
/// theirs does not count. torchrun's does, as it cannot be told from a user's.
std::optional<int64_t> users_omp_threads();

/// How many of `threads` a model should use where nobody has asked for a number. A step of little
/// arithmetic gains little on several threads. It loses much where the machine has other work, as
/// threads wait for each other by spinning. The MLP with 109,386 parameters at batch 32 takes 0.9
/// of its time with 2 threads on 2 idle cores. It takes twice its time when those are shared with
/// others. At batch 128 it gains in both cases. So a thread is worth 5 million multiplications
/// forward. Models with convolutions get all threads, as their parameters do not say how often they
/// are used.
int threads_worth_using(int threads, const torch::nn::Module& module, int64_t batch_size);

/// For a program that no launcher of ours starts: the threads that `lockstep train` would choose,
/// and their way to wait. Sets the number of threads of the operations that the calling thread
/// makes (at::set_num_threads), and returns it. A user's OMP_NUM_THREADS stands. On a machine with
/// other work, threads that wait sleep sooner (lockstep/launch/omp_waiting.h). `batch_size`:
/// samples of a step, times the tokens of a sample where the model works on each.
int set_num_threads_for(const torch::nn::Module& module, int64_t batch_size);

}  // namespace lockstep
