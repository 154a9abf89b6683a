#pragma once

#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "lockstep/comm/world.h"
#include "tools/lockstep/bench/bench.h"

namespace lockstep::tool {

using BenchClock = std::chrono::steady_clock;

inline double seconds_since(BenchClock::time_point start) {
  return std::chrono::duration<double>(BenchClock::now() - start).count();
}

/// Calls `run` `steps` times by the clock and appends each time in microseconds.
template <class Run>
void time_calls(Run run, int64_t steps, std::vector<double>& times) {
  for (int64_t i = 0; i < steps; ++i) {
    const auto start = BenchClock::now();
    run();
    times.push_back(seconds_since(start) * 1e6);
  }
}

/// Calls `run` some times, then `steps` times by the clock: the same as the Python twins'.
template <class Run>
double median_us(Run run, int64_t warmup, int64_t steps) {
  for (int64_t i = 0; i < warmup; ++i) run();
  std::vector<double> times;
  time_calls(run, steps, times);
  return median(std::move(times));
}

/// The group that the worker's configuration says.
World join_group(const nlohmann::json& config);

/// The worker of `bench step`: `us_per_step`, and with `profile` in the configuration also
/// `profiles`, one object per rank (see to_object), on rank 0.
nlohmann::json bench_step_worker(const nlohmann::json& config);

/// The worker of `bench data-parallel`: `sizes`, an object for each of `batch_sizes`, whose times
/// are medians. See bench_data_parallel.
nlohmann::json bench_data_parallel_worker(const nlohmann::json& config);

/// The worker of `bench memory`: `ranks`, an object per rank: what it keeps (StateBytes) at a
/// step's fullest moment, and the most memory that its process had.
nlohmann::json bench_memory_worker(const nlohmann::json& config);

/// The worker of `bench allreduce`: `p50_us`, `bound_us` and `of_bound`, one figure per size. The
/// latter two are null where nothing is to be moved or not by copying: one rank, tensors on a
/// device.
///
/// The bound is the time that copying alone takes. Through shared memory each of two ranks must at
/// least read its tensor and write as much to memory that the other sees. It must also read as much
/// from there and write it to its tensor. That holds whether it hands over all of its values or
/// half of them and half of the sums. So all ranks copy at once with memcpy, piece by piece,
/// without waiting for each other. They copy the tensor into a slot and a neighbour's slot into the
/// tensor. The best of several sizes of pieces counts. More ranks must read more than that, up to
/// twice as much: for them the bound is out of reach. It holds for tensors of the rank's own, as
/// here. What lies in shared memory from the start, as DistributedDataParallel's buckets do, is not
/// copied. Alternates with the all-reduces, on the same tensor. `of_bound` is the median of the
/// turns' shares.
nlohmann::json bench_allreduce_worker(const nlohmann::json& config);

/// The worker of `bench rpc`: `rows`, an object for each of the configuration's `rows`: p50_us,
/// p99_us (null for throughput, where p50_us is the mean) and calls_per_s.
nlohmann::json bench_rpc_worker(const nlohmann::json& config);

/// Memory that all ranks of `bench allreduce` map for the bound: so much per rank.
inline constexpr int64_t kBoundBytes = 1 << 20;

}  // namespace lockstep::tool
