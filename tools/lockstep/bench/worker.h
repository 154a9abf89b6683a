#pragma once

#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/world.h"
#include "tools/lockstep/bench/bench.h"

namespace lockstep::tool {

using BenchClock = std::chrono::steady_clock;

inline double seconds_since(BenchClock::time_point start) {
  return std::chrono::duration<double>(BenchClock::now() - start).count();
}

/// Calls `run` some times, then `steps` times by the clock: the same as the Python twins'. The
/// times in microseconds.
template <class Run>
std::vector<double> timed(const Run& run, int64_t warmup, int64_t steps) {
  for (int64_t i = 0; i < warmup; ++i) run();
  std::vector<double> times;
  for (int64_t i = 0; i < steps; ++i) {
    const auto start = BenchClock::now();
    run();
    times.push_back(seconds_since(start) * 1e6);
  }
  return times;
}

/// The group that the worker's configuration says.
World join_group(const nlohmann::json& config);

/// The hidden `lockstep bench worker JSON`: what a process that a BenchRunner starts does. The
/// object has `kind`, the bench's name, its settings, and `result`, the file that rank 0 writes.
int bench_worker(const std::string& config);

// Each bench's worker.
/// `us_per_step`, and with `profile` in the configuration also `profiles`, one object per rank (see
/// to_object), on rank 0.
nlohmann::json step_worker(const nlohmann::json& config);
/// `ranks`, an object per rank: what it keeps (StateBytes) at a step's fullest moment, and the most
/// memory that its process had.
nlohmann::json memory_worker(const nlohmann::json& config);
/// Trains on all samples, as often as `epochs` says. Rank 0's `seconds` of an epoch (the median)
/// and `parts`, the seconds that each part of its steps took.
nlohmann::json scaling_worker(const nlohmann::json& config);
/// Saves into `folder`: bytes, rank_bytes, stall_ms, of_memcpy, seconds and of_dd, the medians of
/// `saves` of them, each beside a memcpy and a dd. With `reads` it looks at what is there:
/// read_bytes.
nlohmann::json checkpoint_worker(const nlohmann::json& config);
/// `rows`, an object for each of `batch_sizes`, whose times are medians.
nlohmann::json data_parallel_worker(const nlohmann::json& config);
/// `rows`, for each size: p50_us, bound_us and of_bound. The latter two are null where nothing is
/// to be moved or not by copying: one rank, tensors on a device.
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
nlohmann::json allreduce_worker(const nlohmann::json& config);
/// `rows`, an object for each of the configuration's `rows`: p50_us, p99_us (null for throughput,
/// where p50_us is the mean) and calls_per_s.
nlohmann::json rpc_worker(const nlohmann::json& config);
/// `samples_per_s`
nlohmann::json loader_worker(const nlohmann::json& config);
/// One job of `bench recovery`, of `ranks` forks that train on MNIST in `data`. `side`: "ours",
/// with `replacement` or without, or "restart". Nothing is returned: what ranks do lies in
/// `folder`, see bench/recovery.py.
nlohmann::json recovery_worker(const nlohmann::json& config);
/// Meets the others, sums one number, and ends.
nlohmann::json launch_worker(const nlohmann::json& config);

}  // namespace lockstep::tool
