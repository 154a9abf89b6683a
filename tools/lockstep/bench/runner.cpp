#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <set>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/socket.h"
#include "lockstep/base/text.h"
#include "lockstep/launch/omp_waiting.h"
#include "lockstep/launch/program.h"
#include "tools/lockstep/bench/bench.h"

namespace lockstep::tool {

/// The Python twins' sources by file name; made by CMake from bench/.
const std::map<std::string, std::string>& bench_scripts();

namespace {

using Json = nlohmann::ordered_json;

/// Longer than any sensible run of one side of a round.
constexpr auto kRunTimeout = std::chrono::minutes(10);

/// What a run wrote; none: nothing, or not all of it.
std::optional<Json> result_in(const std::string& file) {
  std::error_code ignored;
  if (!std::filesystem::exists(file, ignored)) return std::nullopt;
  auto result = Json::parse(read_file(file), nullptr, /*allow_exceptions=*/false);
  return result.is_discarded() ? std::nullopt : std::optional(std::move(result));
}

/// The first that failed by itself says more than those that were then ended; none: all succeeded.
const ProcessResult* failed_one(const std::vector<ProcessResult>& results) {
  const ProcessResult* failed = nullptr;
  for (const auto& result : results) {
    const bool says_more = !failed || failed->status == 128 + SIGTERM;
    if (result.status != 0 && says_more) failed = &result;
  }
  return failed;
}

/// Python's processes may crash while they end, as Gloo's threads do at times: all is measured
/// then.
void tell_of_crash(const std::string& what, const ProcessResult& crashed,
                   const std::string& consequence) {
  auto lines = split(crashed.err, '\n');
  while (!lines.empty() && lines.back().empty()) lines.pop_back();
  log_warning(what + " ended with exit code " + std::to_string(crashed.status) +
              " after its result was written" + (lines.empty() ? "" : " (" + lines.back() + ")") +
              "; " + consequence);
}

/// What processes have written. Throws when they failed, or wrote nothing. Python's may have
/// crashed later.
Json taken_result(const std::string& what, const std::vector<ProcessResult>& results,
                  const std::string& file, bool with_python) {
  auto result = result_in(file);
  if (const auto* failed = failed_one(results)) {
    if (!with_python || !result) expect_success(what, *failed);
    tell_of_crash(what, *failed, "the result counts");
  }
  if (!result) throw Error(what + " wrote no result");
  return *result;
}

/// The environment of a rank: our launcher's variables and nobody else's. Rank -1: of no rank.
std::map<std::string, std::string> rank_environment(int64_t rank, int64_t ranks, int threads,
                                                    bool with_python) {
  std::map<std::string, std::string> env;
  for (char** entry = environ; *entry; ++entry) {
    const std::string name = std::string(*entry).substr(0, std::string(*entry).find('='));
    for (const char* prefix : {"TORCHELASTIC_", "SLURM_", "OMPI_", "PMIX_", "MASTER_", "GROUP_"}) {
      if (name.starts_with(prefix)) env[name] = "";
    }
  }
  for (const char* name : {"RANK", "LOCAL_RANK"}) env[name] = rank < 0 ? "" : std::to_string(rank);
  for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) {
    env[name] = rank < 0 ? "" : std::to_string(ranks);
  }
  env["OMP_NUM_THREADS"] = std::to_string(threads);
  // Gloo in Python looks for an interface by the host's name, ours takes loopback: the same for
  // all.
  if (!env_string("GLOO_SOCKET_IFNAME")) env["GLOO_SOCKET_IFNAME"] = "lo";
  env["PYTHONDONTWRITEBYTECODE"] = "1";
  if (with_python) launch::forget_omp_waiting(env);  // What we chose for ourselves.
  return env;
}

}  // namespace

double median(Figures values) {
  if (values.empty()) throw Error("no values to take the median of");
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double median_ratio(const Figures& ours, const Figures& theirs) {
  Figures ratios;
  for (size_t i = 0; i < ours.size(); ++i) ratios.push_back(ours[i] / theirs[i]);
  return median(std::move(ratios));
}

Figures figures_at(const Rounds& rounds, const std::string& pointer) {
  Figures figures;
  for (const auto& round : rounds) {
    const Json& value = round.at(Json::json_pointer(pointer));
    if (!value.is_null()) figures.push_back(value);
  }
  return figures;
}

Json median_at(const Rounds& rounds, const std::string& pointer) {
  Figures figures = figures_at(rounds, pointer);
  return figures.empty() ? Json() : Json(median(std::move(figures)));
}

Json middle_round(Rounds rounds, const std::string& key) {
  std::sort(rounds.begin(), rounds.end(), [&](const Json& a, const Json& b) {
    return a[key].get<double>() < b[key].get<double>();
  });
  return rounds[(rounds.size() - 1) / 2];
}

void add_comparison(Json& row, const std::string& key, const Sides& sides, const std::string& side,
                    const std::string& pointer) {
  row[key] = median_at(sides.at(side), pointer);
  const auto python = sides.find(kPythonSide);
  if (python == sides.end()) return;
  row["python_" + key] = median_at(python->second, pointer);
  row["ratio"] =
      median_ratio(figures_at(sides.at(side), pointer), figures_at(python->second, pointer));
}

Json pick(const Json& from, const std::vector<std::string>& keys) {
  Json row;
  for (const auto& key : keys) row[key] = from.at(key);
  return row;
}

std::vector<std::string> under_mpirun(int64_t ranks, const std::vector<std::string>& command) {
  std::vector<std::string> words = {"mpirun",          "-np",       std::to_string(ranks),
                                    "--oversubscribe", "--bind-to", "none"};
  if (::geteuid() == 0) words.push_back("--allow-run-as-root");
  words.insert(words.end(), command.begin(), command.end());
  return launch::find_program(words, launch::ProgramKind::executable).argv;
}

std::string own_program() {
  return std::filesystem::read_symlink("/proc/self/exe").string();
}

std::vector<std::string> worker_command(const Json& config) {
  return {own_program(), "bench", "worker", config.dump()};
}

BenchRunner::BenchRunner(const BenchOptions& given) : options(given) {
  if (!options.compare_python) return;
  python_ = require_python_with_torch();
  for (const auto& [name, text] : bench_scripts()) {
    write_file_atomically(folder_.path() / name, text);
  }
}

bool BenchRunner::python_has_lockstep() const {
  if (!python_) return false;
  // Not by the name of the module: a folder of that name in the working folder would do.
  const std::string look = "import importlib.metadata as m; m.version('lockstep')";
  return run_process({{python_->path.string(), "-c", look}, {}}, std::chrono::minutes(1)).status ==
         0;
}

std::vector<std::string> BenchRunner::sides() const {
  std::vector<std::string> names = options.backends;
  if (python_) names.push_back(kPythonSide);
  return names;
}

Sides BenchRunner::in_turns(const std::string& what, const std::vector<std::string>& sides,
                            const std::function<Json(const std::string&)>& run) const {
  Sides results;
  const int rounds = options.rounds_or_default();
  for (int round = 1; round <= rounds; ++round) {
    bench_progress(what + ": round " + std::to_string(round) + " of " + std::to_string(rounds));
    for (const auto& side : sides) results[side].push_back(run(side));
  }
  return results;
}

Sides BenchRunner::in_turns(const std::string& what, const Json& config, bool has_twin) {
  return in_turns(what, has_twin ? sides() : options.backends, [&](const std::string& side) {
    Json of_side = config;
    of_side["backend"] = side == kPythonSide ? options.backends.back() : side;
    return run_ranks(side == kPythonSide, of_side);
  });
}

std::vector<std::string> BenchRunner::python_command(const std::string& script,
                                                     const Json& config) const {
  return {python_->path.string(), (folder_.path() / script).string(), config.dump()};
}

std::string BenchRunner::fresh(const std::string& what) {
  return (folder_.path() / (what + std::to_string(runs_++))).string();
}

Json BenchRunner::run_ranks(bool with_python, Json config) {
  config["bind_to"] = options.bind_to;
  config["result"] = fresh("result");
  config["init_method"] = "file://" + fresh("meet");
  const int64_t ranks = config.at("ranks");
  const std::string kind = config.at("kind");
  static const std::set<std::string> kPythonToo{"nccl", "lockstep", "alone"};
  if (with_python && !kPythonToo.contains(config["backend"])) config["backend"] = "gloo";
  const auto command = with_python ? python_command(kind + ".py", config) : worker_command(config);
  std::vector<ProcessSpec> specs;
  if (config["backend"] == "mpi") {
    specs.push_back(
        {under_mpirun(ranks, command), rank_environment(-1, 0, options.threads, false)});
  }
  for (int64_t rank = 0; rank < ranks && config["backend"] != "mpi"; ++rank) {
    specs.push_back({command, rank_environment(rank, ranks, options.threads, with_python)});
  }
  const std::string what = (with_python ? "Python's " : "") + kind + " benchmark";
  return taken_result(what, run_processes(specs, kRunTimeout), config["result"], with_python);
}

ProcessResult BenchRunner::run_whole(const std::string& what, std::vector<std::string> command,
                                     bool with_python) const {
  const auto env = rank_environment(-1, 0, options.threads, with_python);
  auto result = run_process({std::move(command), env}, kRunTimeout);
  expect_success(what, result);
  return result;
}

ProcessResult BenchRunner::run_python(std::vector<std::string> command) const {
  return run_process({std::move(command), rank_environment(-1, 0, options.threads, true)},
                     kRunTimeout);
}

Json BenchRunner::run_python_training(Json config) {
  config["init_method"] = "file://" + fresh("meet");
  config["result"] = fresh("result");
  const auto run = run_python(python_command("train.py", config));
  Json result = taken_result("Python's training", {run}, config["result"], /*with_python=*/true);
  result["seconds"] = run.seconds;
  result["peak_bytes"] = run.peak_bytes;
  return result;
}

std::vector<std::string> BenchRunner::torchrun_command(
    const std::string& script, const Json& config, int64_t ranks,
    const std::vector<std::string>& flags) const {
  // Else ranks that start again meet by keys of those before them, and wait for ever.
  std::vector<std::string> command = {"env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"};
  command.insert(command.end(), {python_->path.string(), "-m", "torch.distributed.run",
                                 "--nproc-per-node", std::to_string(ranks)});
  command.insert(command.end(), flags.begin(), flags.end());
  command.insert(command.end(), {(folder_.path() / script).string(), config.dump()});
  return command;
}

double BenchRunner::torchrun_seconds(int64_t ranks) {
  constexpr int kMostCrashes = 3;
  for (int crashes = 0;; ++crashes) {
    const std::string result = fresh("result");
    // One that was free a moment ago: torchrun cannot be handed a socket.
    const uint16_t port = bound_port(listen_on("127.0.0.1", 0).get());
    const auto run = run_python(torchrun_command("launch.py", {{"result", result}}, ranks,
                                                 {"--master-port", std::to_string(port)}));
    if (run.status == 0) return run.seconds;
    if (!result_in(result) || crashes == kMostCrashes) expect_success("torchrun", run);
    tell_of_crash("torchrun", run, "it is repeated");
  }
}

double BenchRunner::python_launch_seconds(int64_t ranks) {
  const Json config = {{"result", fresh("result")}, {"backend", "lockstep"}};
  std::vector<std::string> command = {own_program(), "run", "--nproc-per-node",
                                      std::to_string(ranks)};
  const auto worker = python_command("launch.py", config);
  command.insert(command.end(), worker.begin(), worker.end());
  return run_whole("lockstep run", command, /*with_python=*/true).seconds;
}

}  // namespace lockstep::tool
