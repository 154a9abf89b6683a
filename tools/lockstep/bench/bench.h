#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/file.h"
#include "lockstep/comm/world.h"
#include "lockstep/parallel/pipeline/schedule.h"
#include "tools/lockstep/env_python.h"
#include "tools/lockstep/process.h"

namespace lockstep::tool {

/// Of bench pipeline.
struct PipelineBenchOptions {
  std::vector<std::string> schedules = pipeline_schedule_names();
  std::vector<int64_t> micro_batches = {8};  ///< Enough that schedules differ by some percent.
  int64_t stages_per_rank = 0;               ///< 0: the schedule's own.
  StageCosts costs = {};                     ///< All the same, as the formulas have it.
  double transfer = 0;                       ///< None, as the formulas have it.
  double sleep_ms = 0;                       ///< Per unit of time; 0: simulate only.
};

/// What `lockstep bench` was asked to measure. Times are medians; see `rounds`.
struct BenchOptions {
  std::vector<std::string> models = {"mlp"};
  int64_t batch_size = 0;  ///< 0: the usual one of the work: 32 for a step, 64 elsewhere.
  std::vector<int64_t> devices = {2};                 ///< Ranks, one number after the other.
  std::vector<std::string> strategies = {"ddp"};      ///< Of step and memory; see make_strategy.
  std::string mesh = {};                              ///< Of the ranks, for each strategy.
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
  std::string data_dir = {};  ///< Where MNIST lies; empty: as `lockstep train` looks for it.
  int epochs = 3;             ///< Of bench train and scaling.
  std::string plot = {};      ///< Of bench pipeline: the file for an SVG; empty: none.
  /// Of bench data-parallel: samples of a batch, one size after the other.
  std::vector<int64_t> batch_sizes = {1, 8, 64, 256, 1024};
  int64_t replicas = 0;   ///< Of bench data-parallel; 0: one for each core.
  bool training = false;  ///< Of bench data-parallel: forward and backward, not inference.
  /// Of bench step: batches come from a loader, and each row gets `profile`, where a step's time
  /// goes.
  bool profile = false;
  bool operations = false;  ///< With `profile`: also `operations`, the costliest of LibTorch's.
  std::string trace = {};   ///< With `profile`: the file for a Chrome trace; empty: none.
  PipelineBenchOptions pipeline = {};
  int64_t kills = 100;      ///< Of bench recovery, of each row; as many as a p99 needs.
  double kill_every = 10;   ///< Seconds, where bench recovery measures goodput; as busy hosts fail.
  uint64_t seed = 0;        ///< The same: of what is killed when.
  bool json = false;        ///< Print one JSON object instead of a table.
  std::string output = {};  ///< The file for that object too; empty: none.

  int rounds_or_default() const { return rounds > 0 ? rounds : (compare_python ? 5 : 3); }
  int64_t batch_size_or(int64_t usual) const { return batch_size > 0 ? batch_size : usual; }
};

using PlainJson = nlohmann::json;
using BenchRow = nlohmann::ordered_json;  ///< Its keys stay in order.
using BenchRows = std::vector<BenchRow>;
using Figures = std::vector<double>;
/// What one side of a benchmark gave, a result a round.
using Rounds = std::vector<BenchRow>;
/// By a side's name: a backend, or kPythonSide.
using Sides = std::map<std::string, Rounds>;

inline constexpr const char* kPythonSide = "python";
/// More than the collectives that a group checks at its start, and enough for caches and buckets.
inline constexpr int64_t kWarmup = 30;

/// Runs the sides of a benchmark in turns, in processes that it starts.
class BenchRunner {
 public:
  /// Looks for Python at once when it will be needed. Throws Error saying how to get it.
  explicit BenchRunner(const BenchOptions& options);

  const BenchOptions options;

  bool has_python() const { return python_.has_value(); }
  /// The interpreter that is compared with.
  const PythonFound& python() const { return python_.value(); }
  /// Whether Python can import our package.
  bool python_has_lockstep() const;
  /// The backends, and Python where it is compared with.
  std::vector<std::string> sides() const;
  /// Calls `run` with each side's name, `rounds` times over. `what` is shown meanwhile.
  Sides in_turns(const std::string& what, const std::vector<std::string>& sides,
                 const std::function<BenchRow(const std::string& side)>& run) const;
  /// The same of run_ranks. Python is a side only if it has a twin of this work.
  Sides in_turns(const std::string& what, const BenchRow& config, bool has_twin = true);

  /// Runs a bench's worker, or Python's script of that name, as config["ranks"] ranks of `lockstep
  /// run`, or of mpirun, that meet by a file. Returns rank 0's result. `config` holds `kind`, the
  /// bench's name, `ranks`, `backend` and what the worker reads.
  BenchRow run_ranks(bool with_python, BenchRow config);
  /// Runs one command of ours. Throws when it fails.
  ProcessResult run_whole(const std::string& what, const std::vector<std::string>& command) const;
  /// Runs one of Python's scripts, by itself or under a launcher, whose words come first. In its
  /// configuration it gets `result`, a file, and `init_method`.
  std::pair<ProcessResult, BenchRow> run_python(const std::string& what, const std::string& script,
                                                BenchRow config,
                                                std::vector<std::string> launcher = {});
  /// The words of such a script, without what we have chosen for OpenMP, and of a torchrun of so
  /// many ranks.
  std::vector<std::string> python_command(const std::string& script, const BenchRow& config) const;
  std::vector<std::string> torchrun(int64_t ranks, const std::vector<std::string>& flags) const;
  /// The seconds of a torchrun of launch.py.
  double torchrun_seconds(int64_t ranks);

 private:
  /// A name in our folder that no run before has used.
  std::string fresh(const std::string& what);

  TemporaryDirectory folder_{"lockstep-bench"};
  std::optional<PythonFound> python_;
  int runs_ = 0;
};

/// Rows as a text table: one column per key, numbers to the right.
std::string bench_table(const BenchRows& rows);
/// The same, and where rows have a profile: a heading and a table each.
std::string step_text(const BenchRows& rows);
/// A sentence per row: how much faster, and what ate the rest.
std::string scaling_text(const BenchRows& rows);

/// A benchmark: a row of the one table.
struct Bench {
  std::string name;
  std::string summary;
  std::string flags;  ///< Which it takes beside those that all take.
  std::vector<std::string> examples;
  /// Its rows. A row has the configuration's keys and the figures. When Python is compared with, it
  /// also has `python_` and the figure's name, and `ratio` (ours divided by Python's).
  BenchRows (*measure)(BenchRunner&);
  /// What a process that run_ranks starts does. Null result: writes none.
  PlainJson (*worker)(const PlainJson& config) = nullptr;
  std::string (*text)(const BenchRows&) = bench_table;  ///< The rows as they are printed.
  BenchOptions defaults = {};
};

const std::vector<Bench>& benches();
/// Throws UsageError for another name.
const Bench& bench_named(const std::string& name);
/// What these words after a bench's name ask for; none: for its --help, which is printed. Throws
/// UsageError.
std::optional<BenchOptions> parse_bench(const Bench& bench, const std::vector<std::string>& args);

/// Each bench's rows, and its worker, where it has one.
using Measure = BenchRows(BenchRunner&);
using Worker = PlainJson(const PlainJson& config);

/// model, batch_size, ranks, backend, strategy, precision, optimizer, us_per_step. With a profile:
/// the round whose step is the median one counts, and `trace` is of it. It also has
/// - `profile`, a list of {part, us, share, median_us, rank_min_us, rank_max_us}. The parts before
///   "step" add up to it.
/// - `operations`, a list of {operation, calls, us, share}, rank 0's. Only where LibTorch's
///   operations were noted.
Measure bench_step;
Worker step_worker;
/// strategy, model, ranks, precision, rank, parameters, state_bytes, peak_rss_bytes and others
Measure bench_memory;
Worker memory_worker;
/// model, batch_size, ranks, ..., seconds (of an epoch), parts, and against the row with the fewest
/// ranks: speedup, efficiency, lost_s (per part: by how much it took longer, divided by the ranks).
Measure bench_scaling;
Worker scaling_worker;
/// model, strategy, ranks, bytes (written by all), rank_bytes (by the rank that writes most),
/// read_ranks, read_bytes (the most that one of so many ranks reads), stall_ms, of_memcpy (the
/// stall, of the time that memcpy of the same takes), seconds, of_dd (the speed, of dd's).
/// Python's: torch_save_s, dcp_stall_ms, dcp_s; null where it has no such strategy.
Measure bench_checkpoint;
Worker checkpoint_worker;
/// bytes, ranks, backend, p50_us, bound_us, of_bound; the latter two are null where nothing is to
/// be moved or not by copying: one rank, tensors on a device.
///
/// The bound is the time that copying alone takes. Through shared memory each of two ranks must at
/// least read its tensor and write as much to memory that the other sees. It must also read as much
/// from there and write it to its tensor. So all ranks copy at once with memcpy, piece by piece,
/// without waiting for each other, in turns with the all-reduces of the same tensor. The best of
/// several sizes of pieces counts. More ranks must read more than that, up to twice as much: for
/// them the bound is out of reach. What lies in shared memory from the start, as
/// DistributedDataParallel's buckets do, is not copied.
Measure bench_allreduce;
Worker allreduce_worker;
/// call, bytes, p50_us (for throughput the mean), p99_us (null for throughput), calls_per_s
Measure bench_rpc;
Worker rpc_worker;
/// side (ours; restart, where all start again from checkpoints; torchrun, the same with Python's
/// DDP), devices, replacement, recovery_p50_s and recovery_p99_s (from a kill to the next finished
/// step), detection_p50_s (to the last survivor's failed call), samples_lost (of steps that nobody
/// finished), samples_repeated (of finished steps that were made again), goodput (steps with a kill
/// every `kill_every` seconds, by those without), sha256_equal (the weights after each epoch, to
/// those of a run without kills). Null where there is none.
Measure bench_recovery;
Worker recovery_worker;
Measure bench_loader;  ///< dataset, batch_size, samples_per_s
Worker loader_worker;
Measure bench_launch;  ///< ranks, backend, seconds
Worker launch_worker;
Measure bench_train;  ///< model, ranks, epochs, seconds, peak_bytes, accuracy
/// work, unit, lockstep, gloo (of Python over that backend), ratio. Throws Error where Python has
/// not our package.
Measure bench_python;
/// model, batch_size, replicas, threads, single_us (the model by itself), single_all_threads_us
/// (with the threads of all replicas), replica_us (on a replica's part), start_us (replicas that do
/// nothing), us, ratio, faster, why.
Measure bench_data_parallel;
Worker data_parallel_worker;
/// schedule, ranks, stages, micro_batches, formula_percent, bubble_percent, kept_activations,
/// measured_percent
Measure bench_pipeline;
/// Of each figure of bench/targets.json: target, bound, at_most, measured, met, own and other (what
/// was measured, and by what it was divided), command. Without `json` it prints each as soon as it
/// is known.
Measure bench_targets;

/// The configurations of the models, ranks, strategies and precisions that are asked for.
std::vector<BenchRow> cases_of(const BenchOptions& options, const std::string& kind);

/// Sets the figure's median over the rounds of `side`. Where there are rounds of Python's it also
/// sets theirs and, as `ratio`, the median of the ratios. `pointer` says where it stands in a
/// result.
void add_comparison(BenchRow& row, const std::string& key, const Sides& sides,
                    const std::string& side, const std::string& pointer,
                    const std::string& ratio = "ratio");
/// Those at a JSON pointer, without the nulls.
Figures figures_at(const Rounds& rounds, const std::string& pointer);
/// Null where there are none.
BenchRow median_at(const Rounds& rounds, const std::string& pointer);
/// The round whose figure is the median one, the lower of two.
BenchRow middle_round(Rounds rounds, const std::string& key);
double median(Figures values);
double percentile(Figures values, double share);
double median_ratio(const Figures& ours, const Figures& theirs);
/// The keys of an object, in this order.
BenchRow pick(const BenchRow& from, const std::vector<std::string>& keys);

/// printf's text.
template <class... Args>
std::string formatted(const char* format, Args... args) {
  char text[512];
  std::snprintf(text, sizeof text, format, args...);
  return text;
}

/// A line about what is being measured, on standard error. A terminal shows the newest alone.
void bench_progress(const std::string& text);

/// The command that starts `command` as `ranks` ranks of mpirun on this host. They are not bound to
/// cores, as the other benchmarks' ranks are not, and may be more than there are cores. Throws
/// UsageError where there is no mpirun.
std::vector<std::string> under_mpirun(int64_t ranks, const std::vector<std::string>& command);
/// The path of this program.
std::string own_program();
/// `command` as so many ranks of `lockstep run`.
std::vector<std::string> under_run(int64_t ranks, const std::vector<std::string>& command);
/// The command of a process that runs a bench's worker: the hidden `lockstep bench worker JSON`.
/// The object has `kind`, the bench's name, its settings, and `result`, the file that rank 0
/// writes.
std::vector<std::string> worker_command(const BenchRow& config);
int run_worker(const std::string& config);
/// The group that a worker's configuration says.
World join_group(const PlainJson& config);

using BenchClock = std::chrono::steady_clock;

inline double seconds_since(BenchClock::time_point start) {
  return std::chrono::duration<double>(BenchClock::now() - start).count();
}

/// Calls `run` some times, then `steps` times by the clock: the same as the Python twins'. The
/// times in microseconds.
template <class Run>
Figures timed(const Run& run, int64_t warmup, int64_t steps) {
  for (int64_t i = 0; i < warmup; ++i) run();
  Figures times;
  for (int64_t i = 0; i < steps; ++i) {
    const auto start = BenchClock::now();
    run();
    times.push_back(seconds_since(start) * 1e6);
  }
  return times;
}

/// The files of bench/ by name, which travel in the library: the Python twins and the targets.
const std::map<std::string, std::string>& bench_files();

}  // namespace lockstep::tool
