#include <unistd.h>

#include <algorithm>
#include <set>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/socket.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/rendezvous/job_environment.h"
#include "lockstep/launch/omp_waiting.h"
#include "lockstep/launch/program.h"
#include "tools/lockstep/bench/bench.h"
#include "tools/lockstep/train/placement.h"

namespace lockstep::tool {
namespace {

/// The environment of what we start: no rank's, and without what a launcher or scheduler has set.
std::map<std::string, std::string> launch_environment(int threads) {
  std::map<std::string, std::string> env = {{"OMP_NUM_THREADS", std::to_string(threads)},
                                            {"PYTHONDONTWRITEBYTECODE", "1"},
                                            {"RANK", ""},
                                            {"LOCAL_RANK", ""},
                                            {"WORLD_SIZE", ""},
                                            {"LOCAL_WORLD_SIZE", ""}};
  for (char** entry = environ; *entry; ++entry) {
    const std::string name = std::string(*entry).substr(0, std::string(*entry).find('='));
    for (const char* prefix :
         {"TORCHELASTIC_", "SLURM_", "OMPI_", "PMIX_", "MASTER_", "GROUP_", "PET_"}) {
      if (name.starts_with(prefix)) env[name] = "";
    }
  }
  // Gloo in Python looks for an interface by the host's name, ours takes loopback: the same for
  // all.
  if (!env_string("GLOO_SOCKET_IFNAME")) env["GLOO_SOCKET_IFNAME"] = "lo";
  return env;
}

}  // namespace

double median(Figures values) {
  if (values.empty()) throw Error("no values to take the median of");
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double percentile(Figures values, double share) {
  std::sort(values.begin(), values.end());
  const auto place = static_cast<size_t>(share * static_cast<double>(values.size()));
  return values.at(std::min(place, values.size() - 1));
}

double median_ratio(const Figures& ours, const Figures& theirs) {
  Figures ratios;
  for (size_t i = 0; i < ours.size(); ++i) ratios.push_back(ours[i] / theirs[i]);
  return median(std::move(ratios));
}

Figures figures_at(const Rounds& rounds, const std::string& pointer) {
  Figures figures;
  for (const auto& round : rounds) {
    const BenchRow& value = round.at(BenchRow::json_pointer(pointer));
    if (!value.is_null()) figures.push_back(value);
  }
  return figures;
}

BenchRow median_at(const Rounds& rounds, const std::string& pointer) {
  Figures figures = figures_at(rounds, pointer);
  return figures.empty() ? BenchRow() : BenchRow(median(std::move(figures)));
}

BenchRow middle_round(Rounds rounds, const std::string& key) {
  std::sort(rounds.begin(), rounds.end(), [&](const BenchRow& a, const BenchRow& b) {
    return a[key].get<double>() < b[key].get<double>();
  });
  return rounds[(rounds.size() - 1) / 2];
}

void add_comparison(BenchRow& row, const std::string& key, const Sides& sides,
                    const std::string& side, const std::string& pointer, const std::string& ratio) {
  row[key] = median_at(sides.at(side), pointer);
  const auto python = sides.find(kPythonSide);
  if (python == sides.end()) return;
  row["python_" + key] = median_at(python->second, pointer);
  row[ratio] =
      median_ratio(figures_at(sides.at(side), pointer), figures_at(python->second, pointer));
}

BenchRow pick(const BenchRow& from, const std::vector<std::string>& keys) {
  BenchRow row;
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

std::vector<std::string> under_run(int64_t ranks, const std::vector<std::string>& command) {
  std::vector<std::string> words = {own_program(), "run", "--nproc-per-node",
                                    std::to_string(ranks)};
  words.insert(words.end(), command.begin(), command.end());
  return words;
}

std::vector<std::string> worker_command(const BenchRow& config) {
  return {own_program(), "bench", "worker", config.dump()};
}

int run_worker(const std::string& text) {
  const auto config = nlohmann::json::parse(text);
  const PlainJson result = bench_named(config.at("kind")).worker(config);
  if (read_job_environment().rank == 0 && !result.is_null())
    write_file_atomically(config.at("result").get<std::string>(), result.dump());
  return 0;
}

World join_group(const PlainJson& config) {
  // Threads are those of OMP_NUM_THREADS, which the runner sets.
  apply(choose_placement({}, config.at("bind_to"), read_job_environment()));
  return init({.backend = config.at("backend"), .init_method = config.at("init_method")});
}

BenchRunner::BenchRunner(const BenchOptions& given) : options(given) {
  if (!options.compare_python) return;
  python_ = require_python_with_torch();
  for (const auto& [name, text] : bench_files()) {
    write_file_atomically(folder_.path() / name, text);
  }
}

bool BenchRunner::python_has_lockstep() const {
  if (!python_) return false;
  // Not by the name of the module: a folder of that name in the working folder would do.
  const std::string look = "import importlib.metadata as m; m.version('lockstep')";
  return run_process({python_->path.string(), "-c", look}).status == 0;
}

std::vector<std::string> BenchRunner::sides() const {
  std::vector<std::string> names = options.backends;
  if (python_) names.push_back(kPythonSide);
  return names;
}

Sides BenchRunner::in_turns(const std::string& what, const std::vector<std::string>& sides,
                            const std::function<BenchRow(const std::string&)>& run) const {
  Sides results;
  const int rounds = options.rounds_or_default();
  for (int round = 1; round <= rounds; ++round) {
    bench_progress(what + ": round " + std::to_string(round) + " of " + std::to_string(rounds));
    for (const auto& side : sides) results[side].push_back(run(side));
  }
  return results;
}

Sides BenchRunner::in_turns(const std::string& what, const BenchRow& config, bool has_twin) {
  return in_turns(what, has_twin ? sides() : options.backends, [&](const std::string& side) {
    BenchRow of_side = config;
    of_side["backend"] = side == kPythonSide ? options.backends.back() : side;
    return run_ranks(side == kPythonSide, of_side);
  });
}

std::vector<std::string> BenchRunner::python_command(const std::string& script,
                                                     const BenchRow& config) const {
  std::vector<std::string> words = {"env"};
  std::map<std::string, std::string> ours;
  launch::forget_omp_waiting(ours);  // Python is to be measured without it.
  for (const auto& variable : ours) words.insert(words.end(), {"-u", variable.first});
  words.insert(words.end(),
               {python_->path.string(), (folder_.path() / script).string(), config.dump()});
  return words;
}

std::string BenchRunner::fresh(const std::string& what) {
  return (folder_.path() / (what + std::to_string(runs_++))).string();
}

BenchRow BenchRunner::run_ranks(bool with_python, BenchRow config) {
  config["bind_to"] = options.bind_to;
  config["result"] = fresh("result");
  config["init_method"] = "file://" + fresh("meet");
  const int64_t ranks = config.at("ranks");
  const std::string kind = config.at("kind");
  static const std::set<std::string> kPythonToo{"nccl", "lockstep", "alone"};
  if (with_python && !kPythonToo.contains(config["backend"])) config["backend"] = "gloo";
  auto command = with_python ? python_command(kind + ".py", config) : worker_command(config);
  if (config["backend"] == "mpi") {
    command = under_mpirun(ranks, command);
  } else {
    command.insert(command.begin(), {"--bind-to", "none"});  // A worker of ours binds itself.
    command = under_run(ranks, command);
  }
  run_whole((with_python ? "Python's " : "") + kind + " benchmark", command);
  return BenchRow::parse(read_file(config["result"]));
}

ProcessResult BenchRunner::run_whole(const std::string& what,
                                     const std::vector<std::string>& command) const {
  auto result = run_process(command, launch_environment(options.threads));
  expect_success(what, result);
  return result;
}

std::pair<ProcessResult, BenchRow> BenchRunner::run_python(const std::string& what,
                                                           const std::string& script,
                                                           BenchRow config,
                                                           std::vector<std::string> launcher) {
  config["init_method"] = "file://" + fresh("meet");
  config["result"] = fresh("result");
  const auto command = python_command(script, config);
  launcher.insert(launcher.end(), command.begin(), command.end());
  auto run = run_whole(what, launcher);
  return {std::move(run), BenchRow::parse(read_file(config["result"]))};
}

std::vector<std::string> BenchRunner::torchrun(int64_t ranks,
                                               const std::vector<std::string>& flags) const {
  // Else ranks that start again meet by keys of those before them, and wait for ever.
  std::vector<std::string> words = {"env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"};
  words.insert(words.end(), {python_->path.string(), "-m", "torch.distributed.run", "--no-python",
                             "--nproc-per-node", std::to_string(ranks)});
  words.insert(words.end(), flags.begin(), flags.end());
  return words;
}

double BenchRunner::torchrun_seconds(int64_t ranks) {
  // One that was free a moment ago: torchrun cannot be handed a socket.
  const uint16_t port = bound_port(listen_on("127.0.0.1", 0).get());
  const auto launcher = torchrun(ranks, {"--master-port", std::to_string(port)});
  return run_python("torchrun", "launch.py", {}, launcher).first.seconds;
}

}  // namespace lockstep::tool
