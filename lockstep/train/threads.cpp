#include "lockstep/train/threads.h"

#include <ATen/Parallel.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "lockstep/base/env.h"
#include "lockstep/base/text.h"
#include "lockstep/launch/omp_waiting.h"
#include "lockstep/launch/variables.h"

namespace lockstep {

std::optional<int64_t> users_omp_threads() {
  constexpr int64_t kMostThreads = 4096;  // What OpenMP does not take counts as unset.
  const auto text = env_string("OMP_NUM_THREADS");
  if (!text || env_flag(launch::kThreadsByLauncherVariable)) return std::nullopt;
  const auto value = parse_int(split(*text, ',').front());
  return value && *value >= 1 && *value <= kMostThreads ? value : std::nullopt;
}

int threads_worth_using(int threads, const torch::nn::Module& module, int64_t batch_size) {
  constexpr int64_t kWorthAThread = 5'000'000;
  int64_t parameters = 0;
  for (const at::Tensor& parameter : module.parameters()) {
    if (parameter.dim() > 2) return threads;
    parameters += parameter.numel();
  }
  const int64_t worth = std::max<int64_t>(1, parameters * batch_size / kWorthAThread);
  return static_cast<int>(std::min<int64_t>(threads, worth));
}

int set_num_threads_for(const torch::nn::Module& module, int64_t batch_size) {
  launch::shorten_omp_waiting();
  if (!users_omp_threads())
    at::set_num_threads(threads_worth_using(at::get_num_threads(), module, batch_size));
  return at::get_num_threads();
}

}  // namespace lockstep
