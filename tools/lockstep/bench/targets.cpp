// `lockstep bench targets`: what bench/targets.json promises, with what was measured.
#include <algorithm>
#include <cstdio>

#include "lockstep/amp/half_support.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "tools/lockstep/bench/bench.h"

namespace lockstep::tool {
namespace {

/// `options` of the command, of one round, with what `given` sets for all targets; and how many
/// rounds there are to be. Of steps and rounds the fewer count.
std::pair<BenchOptions, int> options_of(const std::string& command, const BenchOptions& given) {
  auto words = split(command, ' ');
  BenchOptions options = *parse_bench(bench_named(words.front()), {words.begin() + 1, words.end()});
  int rounds = given.rounds_or_default();
  if (options.rounds > 0) rounds = std::min(rounds, options.rounds);
  options.rounds = 1;
  options.steps = std::min(options.steps, given.steps);
  options.threads = given.threads;
  options.bind_to = given.bind_to;
  options.data_dir = given.data_dir;
  return {options, rounds};
}

/// Why there is nothing to measure here; empty: there is.
std::string what_lacks(const std::string& command, const BenchRunner& runner) {
  if (command == "python" && !runner.python_has_lockstep())
    return runner.python().path.string() + " has no package lockstep";
  if (command.find("bf16-mixed") == std::string::npos) return {};
  const HalfSupport support = half_support(c10::kCPU, at::kBFloat16);
  return support.instructions ? std::string() : support.reason;
}

/// The command's rows, a round after the other: what is compared runs in turns.
std::vector<BenchRow> measure(const std::string& command, const BenchOptions& given) {
  const auto [options, rounds] = options_of(command, given);
  std::vector<BenchRow> results;
  for (int round = 1; round <= rounds; ++round) {
    bench_progress(command + ": round " + std::to_string(round) + " of " + std::to_string(rounds));
    BenchRunner runner(options);
    results.push_back(bench_named(split(command, ' ').front()).measure(runner));
  }
  return results;
}

/// The target's row: medians over the rounds of the figure, of what it is divided by, and of the
/// quotient.
BenchRow row_of(const BenchRow& target, const std::vector<BenchRow>& rounds) {
  BenchRow row = pick(target, {"target", "bound"});
  const bool at_most = target.value("at_most", true);
  const double bound = target["bound"];
  const Figures own = figures_at(rounds, target["figure"]);
  const Figures other = target.contains("other") ? figures_at(rounds, target["other"]) : Figures();
  const double measured = other.empty() ? median(own) : median_ratio(own, other);
  row["at_most"] = at_most;
  row["measured"] = measured;
  row["met"] = at_most ? measured <= bound : measured >= bound;
  row["own"] = median(own);
  row["other"] = other.empty() ? BenchRow() : BenchRow(median(other));
  row["command"] = "lockstep bench " + target["command"].get<std::string>();
  return row;
}

std::string number(double value) {
  return formatted(value >= 1000 ? "%.0f" : value < 0.1 ? "%.4f" : "%.2f", value);
}

void print_row(const BenchRow& row) {
  std::printf(
      "%-74s %-18s %9s  %s\n", row["target"].get<std::string>().c_str(),
      ((row["at_most"].get<bool>() ? "at most " : "at least ") + number(row["bound"])).c_str(),
      number(row["measured"]).c_str(), row["met"].get<bool>() ? "met" : "NOT MET");
  std::fflush(stdout);
}

}  // namespace

BenchRows bench_targets(BenchRunner& runner) {
  const BenchOptions& options = runner.options;
  if (!options.json) std::printf("%-74s %-18s %9s\n", "figure", "target", "measured");
  BenchRows rows;
  std::string command;  // That the rounds are of.
  std::vector<BenchRow> rounds;
  for (const BenchRow& target : BenchRow::parse(bench_files().at("targets.json"))) {
    if (target["command"] != command) {
      command = target["command"];
      const std::string lacks = what_lacks(command, runner);
      if (!lacks.empty()) log_info("bench " + command + " is not measured: " + lacks);
      rounds = lacks.empty() ? measure(command, options) : std::vector<BenchRow>();
    }
    if (rounds.empty()) continue;
    rows.push_back(row_of(target, rounds));
    if (!options.json) print_row(rows.back());
  }
  return rows;
}

}  // namespace lockstep::tool
