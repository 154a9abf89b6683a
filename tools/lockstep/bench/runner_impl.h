#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/lockstep/bench/bench.h"
#include "tools/lockstep/env_python.h"
#include "tools/lockstep/process.h"

namespace lockstep::tool {

/// More than the collectives that a group checks at its start, and enough for caches and buckets.
inline constexpr int64_t kWarmup = 30;

/// The results of one side, a list a round.
using Figures = std::vector<double>;

/// Sets the figure's median, and with Python's figures theirs and the median of the ratios.
void add_comparison(BenchRow& row, const std::string& key, const Figures& own,
                    const Figures& python);

/// Whether it can import our package.
bool python_has_lockstep(const PythonFound& python);

/// Starts the processes of a benchmark, in a folder of its own.
struct BenchRunner::Impl {
  BenchOptions options;
  TemporaryDirectory folder{"lockstep-bench"};
  std::optional<PythonFound> python;
  int runs = 0;

  explicit Impl(const BenchOptions& given);
  std::vector<std::string> own_command(const BenchRow& config) const;
  std::vector<std::string> python_command(const std::string& script, const BenchRow& config) const;
  /// A name in our folder that no run before has used.
  std::string fresh(const std::string& what);
  /// Runs the same work as `ranks` fresh processes that meet by a file, and returns rank 0's
  /// result.
  BenchRow run_ranks(bool with_python, BenchRow config, int64_t ranks);
  /// Runs one command; its wall time and peak memory.
  ProcessResult run_whole(const std::string& what, std::vector<std::string> command);
  ProcessResult run_python(std::vector<std::string> command) const;
  /// Python's training as a whole, and what it wrote.
  std::pair<ProcessResult, BenchRow> run_python_training(const BenchRow& config) const;
  /// The seconds of a torchrun of launch.py. One that crashes while it ends takes another time, so
  /// it is repeated.
  double torchrun_seconds(int64_t ranks);
  /// The same of `lockstep run`, with the backend "lockstep".
  double python_launch_seconds(int64_t ranks);
  void progress(const std::string& what, int round) const;
};

}  // namespace lockstep::tool
