#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/file.h"

namespace lockstep::tool {

/// What `lockstep bench` was asked to measure. Times are medians; see `rounds`.
struct BenchOptions {
  std::vector<std::string> models = {"mlp"};
  int64_t batch_size = 0;        ///< 0: the usual one of the work: 32 for a step, 64 elsewhere.
  std::vector<int64_t> devices;  ///< Ranks; empty: 1 and 2 for step, 2 elsewhere.
  std::vector<std::string> strategies = {"ddp"};      ///< Of step and memory; see make_strategy.
  std::vector<std::string> precisions = {"32-true"};  ///< Of step and memory.
  std::vector<std::string> backends = {"auto"};       ///< What a user gets without naming one.
  /// 0 is a barrier. The others go from a scalar to a large model's gradients. 437 KB are those of
  /// the MLP.
  std::vector<int64_t> sizes = {0, 4, 65536, 437544, 1048576, 4194304, 26214400, 67108864};
  /// Timed steps, all-reduces or batches per run. Enough for a median that repeats within some 5%.
  int64_t steps = 300;
  std::string optimizer = "sgd";  ///< Of step and memory; sgd has a momentum of 0.9.
  std::string bind_to = "auto";   ///< See launch::choose_binding; ours only, not Python's.
  int threads = 1;  ///< Each rank's: one, as launchers set it, so that ranks share no core.
  /// Every round runs each side once in fresh processes, one after the other. So what disturbs a
  /// machine for a while disturbs both. Figures are medians over rounds, ratios medians of the
  /// rounds' ratios. 0: 3, or 5 when Python is compared with.
  int rounds = 0;
  bool compare_python = false;
  std::string data_dir;  ///< Where MNIST lies; empty: as `lockstep train` looks for it.
  int epochs = 3;        ///< Of bench train and scaling.
  std::string plot;      ///< Of bench scaling: the file for an SVG; empty: none.
  /// Of bench data-parallel: samples of a batch, one size after the other.
  std::vector<int64_t> batch_sizes = {1, 8, 64, 256, 1024};
  int64_t replicas = 0;   ///< Of bench data-parallel; 0: one for each core.
  bool training = false;  ///< Of bench data-parallel: forward and backward, not inference.
  /// Of bench step: batches come from a loader, and each row gets `profile`, where a step's time
  /// goes.
  bool profile = false;
  bool operations = false;  ///< With `profile`: also `operations`, the costliest of LibTorch's.
  std::string trace;        ///< With `profile`: the file for a Chrome trace; empty: none.

  int rounds_or_default() const { return rounds > 0 ? rounds : (compare_python ? 5 : 3); }
  int64_t batch_size_or(int64_t usual) const { return batch_size > 0 ? batch_size : usual; }
  /// 32, and for gpt, whose samples have 128 tokens, 8.
  int64_t step_batch_size(const std::string& model) const {
    return batch_size_or(model.starts_with("gpt") ? 8 : 32);
  }
  std::vector<int64_t> devices_or(const std::vector<int64_t>& usual) const {
    return devices.empty() ? usual : devices;
  }
};

using BenchRow = nlohmann::ordered_json;
using BenchRows = std::vector<BenchRow>;

/// Runs benchmarks: starts the workers and the Python twins and puts their figures together. A row
/// has the configuration's keys and the figure. When Python is compared with, it also has `python_`
/// and the figure's name, and `ratio` (ours divided by Python's).
class BenchRunner {
 public:
  /// Looks for Python at once when it will be needed. Throws Error saying how to get it.
  explicit BenchRunner(const BenchOptions& options);
  ~BenchRunner();

  /// model, batch_size, ranks, backend, strategy, precision, optimizer, us_per_step
  BenchRows step();
  /// As step, with `profile`. The round whose step is the median one counts, and `trace` is of it.
  BenchRows profiled_step();
  /// strategy, model, ranks, precision, rank, parameters, state_bytes, peak_rss_bytes and others
  BenchRows memory();
  /// model, batch_size, ranks, ..., seconds (of an epoch), parts, speedup, efficiency, lost_s
  BenchRows scaling();
  BenchRows allreduce();  ///< bytes, ranks, backend, p50_us, bound_us, of_bound
  BenchRows rpc();        ///< call, bytes, p50_us, p99_us, calls_per_s
  BenchRows loader();     ///< dataset, batch_size, workers, samples_per_s
  BenchRows launch();     ///< ranks, backend, seconds
  BenchRows train();      ///< model, ranks, epochs, seconds, peak_bytes, accuracy
  /// work, unit, lockstep, gloo (of Python over that backend), ratio. Throws Error where Python has
  /// not our package.
  BenchRows python_backend();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// `lockstep bench data-parallel`: model, batch_size, replicas, threads, single_us (the model by
/// itself), single_all_threads_us (with the threads of all replicas), replica_us (on a replica's
/// part), start_us (replicas that do nothing), us, ratio, faster, why.
BenchRows bench_data_parallel(const BenchOptions& options);

/// Adds to a row of `bench step` what its ranks' profiles say:
/// - `profile`, a list of {part, us, share, median_us, rank_min_us, rank_max_us}. The parts before
///   "step" add up to it.
/// - `operations`, a list of {operation, calls, us, share}, rank 0's. Only where LibTorch's
///   operations were noted.
void add_profile(BenchRow& row, const nlohmann::json& profiles);

/// Writes the Chrome trace of the ranks' profiles, with `metadata` in it.
void write_trace(const std::filesystem::path& file, const nlohmann::json& profiles,
                 const nlohmann::ordered_json& metadata);

/// Rows that have a profile as text: a heading and a table each.
std::string profile_tables(const BenchRows& rows);

/// The hidden `lockstep bench worker JSON`: what a process that a BenchRunner starts does. The
/// object has `kind`, the work's settings, and `result`, the file that rank 0 writes.
int bench_worker(const std::string& config);

/// `lockstep bench targets`: measures all that the project promises about its speed. Prints (on
/// demand) each promise with what was measured and whether it is met, as soon as that is known.
/// Returns the same as rows.
BenchRows bench_targets(BenchOptions options, bool print_table);

/// Rows as a text table: one column per key, numbers to the right.
std::string bench_table(const BenchRows& rows);

/// A line about what is being measured, on standard error. A terminal shows the newest alone.
void bench_progress(const std::string& text);

double median(std::vector<double> values);

}  // namespace lockstep::tool
