#include <arpa/inet.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <map>
#include <set>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/launch/omp_waiting.h"
#include "tools/lockstep/bench/bench.h"
#include "tools/lockstep/bench/mpirun.h"
#include "tools/lockstep/bench/runner_impl.h"
#include "tools/lockstep/bench/worker.h"
#include "tools/lockstep/env_python.h"
#include "tools/lockstep/env_report.h"
#include "tools/lockstep/mnist_folder.h"
#include "tools/lockstep/process.h"

namespace lockstep::tool {

/// The Python twins' sources by file name; made by CMake from bench/.
const std::map<std::string, std::string>& bench_scripts();

namespace {

using Json = nlohmann::ordered_json;

/// Longer than any sensible run of one side of a round.
constexpr auto kRunTimeout = std::chrono::minutes(10);
/// How often a tensor of that size is reduced: large ones fewer times, the same on all sides.
int64_t allreduce_steps(int64_t bytes, int64_t steps) {
  constexpr int64_t kBytesInAll = 2'000'000'000;
  return std::min(steps, std::max<int64_t>(10, kBytesInAll / std::max<int64_t>(bytes, 1)));
}

/// What a run wrote; none: nothing, or not all of it.
std::optional<Json> result_in(const std::string& file) {
  std::error_code ignored;
  if (!std::filesystem::exists(file, ignored)) return std::nullopt;
  auto result = Json::parse(read_file(file), nullptr, /*allow_exceptions=*/false);
  return result.is_discarded() ? std::nullopt : std::optional(std::move(result));
}

/// The first that failed by itself says more than those that were then ended; none: all succeeded.
const ProcessResult* failed_one(const std::vector<ProcessResult>& results) {
  const auto first = [&](int limit) {
    return std::find_if(results.begin(), results.end(), [limit](const ProcessResult& result) {
      return result.status != 0 && result.status != limit;
    });
  };
  auto found = first(128 + SIGTERM);
  if (found == results.end()) found = first(0);
  return found == results.end() ? nullptr : &*found;
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

std::string own_program() {
  return std::filesystem::read_symlink("/proc/self/exe").string();
}

/// The environment of a rank: our launcher's variables and nobody else's.
std::map<std::string, std::string> rank_environment(int64_t rank, int64_t ranks, int threads) {
  std::map<std::string, std::string> env;
  for (char** entry = environ; *entry; ++entry) {
    const std::string name = std::string(*entry).substr(0, std::string(*entry).find('='));
    for (const char* prefix : {"TORCHELASTIC_", "SLURM_", "OMPI_", "PMIX_", "MASTER_", "GROUP_"}) {
      if (name.rfind(prefix, 0) == 0) env[name] = "";
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
  return env;
}

/// The same for Python's: what we chose for ourselves is not for it.
std::map<std::string, std::string> python_environment(int64_t rank, int64_t ranks, int threads) {
  auto env = rank_environment(rank, ranks, threads);
  launch::forget_omp_waiting(env);
  return env;
}

/// A port that was free a moment ago, for programs that cannot be handed a socket.
int free_port() {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    throw SystemError("no free port on loopback", errno);
  }
  return ntohs(address.sin_port);
}

}  // namespace

void add_comparison(Json& row, const std::string& key, const Figures& own, const Figures& python) {
  row[key] = median(own);
  if (python.empty()) return;
  Figures ratios;
  for (size_t i = 0; i < own.size(); ++i) ratios.push_back(own[i] / python[i]);
  row["python_" + key] = median(python);
  row["ratio"] = median(ratios);
}

double median(std::vector<double> values) {
  if (values.empty()) throw Error("no values to take the median of");
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

BenchRunner::Impl::Impl(const BenchOptions& given) : options(given) {
  if (!options.compare_python) return;
  python = require_python_with_torch();
  for (const auto& [name, text] : bench_scripts()) {
    write_file_atomically(folder.path() / name, text);
  }
}

std::vector<std::string> BenchRunner::Impl::own_command(const Json& config) const {
  return {own_program(), "bench", "worker", config.dump()};
}

std::vector<std::string> BenchRunner::Impl::python_command(const std::string& script,
                                                           const Json& config) const {
  return {python->path.string(), (folder.path() / script).string(), config.dump()};
}

std::string BenchRunner::Impl::fresh(const std::string& what) {
  return (folder.path() / (what + std::to_string(runs++))).string();
}

Json BenchRunner::Impl::run_ranks(bool with_python, Json config, int64_t ranks) {
  config["bind_to"] = options.bind_to;
  config["ranks"] = ranks;
  config["result"] = fresh("result");
  config["init_method"] = "file://" + fresh("meet");
  const std::string kind = config["kind"];
  static const std::set<std::string> kPythonToo{"nccl", "lockstep", "alone"};
  if (with_python && !kPythonToo.contains(config["backend"])) config["backend"] = "gloo";
  std::vector<ProcessSpec> specs;
  const bool by_mpirun = config["backend"] == "mpi";
  if (by_mpirun) {
    specs.push_back(
        {under_mpirun(ranks, own_command(config)), rank_environment(-1, 0, options.threads)});
  }
  for (int64_t rank = 0; rank < ranks && !by_mpirun; ++rank) {
    if (with_python) {
      specs.push_back(
          {python_command(kind + ".py", config), python_environment(rank, ranks, options.threads)});
    } else {
      specs.push_back({own_command(config), rank_environment(rank, ranks, options.threads)});
    }
  }
  const std::string what = (with_python ? "Python's " : "") + kind + " benchmark";
  const auto results = run_processes(specs, kRunTimeout);
  const auto result = result_in(config["result"]);
  if (const auto* failed = failed_one(results)) {
    if (!with_python || !result) expect_success(what, *failed);
    tell_of_crash(what, *failed, "the result counts");
  }
  if (!result) throw Error(what + " wrote no result");
  return *result;
}

ProcessResult BenchRunner::Impl::run_whole(const std::string& what,
                                           std::vector<std::string> command) {
  auto result =
      run_process({std::move(command), rank_environment(-1, 0, options.threads)}, kRunTimeout);
  expect_success(what, result);
  return result;
}

ProcessResult BenchRunner::Impl::run_python(std::vector<std::string> command) const {
  return run_process({std::move(command), python_environment(-1, 0, options.threads)}, kRunTimeout);
}

std::pair<ProcessResult, Json> BenchRunner::Impl::run_python_training(const Json& config) const {
  auto run = run_python(python_command("train.py", config));
  const auto result = result_in(config["result"]);
  if (!result) expect_success("Python's training", run);
  if (!result) throw Error("Python's training wrote no result");
  if (run.status != 0) tell_of_crash("Python's training", run, "the result counts");
  return {std::move(run), *result};
}

double BenchRunner::Impl::torchrun_seconds(int64_t ranks) {
  constexpr int kMostCrashes = 3;
  for (int crashes = 0;; ++crashes) {
    const std::string result = fresh("result");
    const auto run =
        run_python({python->path.string(), "-m", "torch.distributed.run", "--nproc-per-node",
                    std::to_string(ranks), "--master-port", std::to_string(free_port()),
                    (folder.path() / "launch.py").string(), Json{{"result", result}}.dump()});
    if (run.status == 0) return run.seconds;
    if (!result_in(result) || crashes == kMostCrashes) expect_success("torchrun", run);
    tell_of_crash("torchrun", run, "it is repeated");
  }
}

double BenchRunner::Impl::python_launch_seconds(int64_t ranks) {
  const auto run = run_python({own_program(), "run", "--nproc-per-node", std::to_string(ranks),
                               python->path.string(), (folder.path() / "launch.py").string(),
                               Json{{"result", fresh("result")}, {"backend", "lockstep"}}.dump()});
  expect_success("lockstep run", run);
  return run.seconds;
}

void BenchRunner::Impl::progress(const std::string& what, int round) const {
  bench_progress(what + ": round " + std::to_string(round + 1) + " of " +
                 std::to_string(options.rounds_or_default()));
}

BenchRunner::BenchRunner(const BenchOptions& options) : impl_(std::make_unique<Impl>(options)) {}
BenchRunner::~BenchRunner() = default;

namespace {

/// Memory without a name, which goes with this process. Ranks find it by `path_of_memory`: mpirun
/// hands no descriptors on.
UniqueFd shared_memory(int64_t bytes) {
  UniqueFd fd(::memfd_create("lockstep-bench", MFD_CLOEXEC));
  if (!fd || ::ftruncate(fd.get(), bytes) != 0) {
    throw SystemError("cannot make memory for the benchmark", errno);
  }
  return fd;
}

std::string path_of_memory(const UniqueFd& fd) {
  return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(fd.get());
}

Figures of_size(const std::vector<Json>& rounds, const std::string& key, size_t i) {
  Figures figures;
  for (const auto& round : rounds) {
    if (!round[key][i].is_null()) figures.push_back(round[key][i]);
  }
  return figures;
}

void add_bound(BenchRow& row, const Figures& bound, const Figures& shares) {
  row["bound_us"] = nullptr;
  row["of_bound"] = nullptr;
  if (bound.empty()) return;
  row["bound_us"] = median(bound);
  row["of_bound"] = median(shares);
}

}  // namespace

BenchRows BenchRunner::allreduce() {
  const auto& options = impl_->options;
  Json sizes = Json::array();
  for (const int64_t bytes : options.sizes) {
    sizes.push_back({{"bytes", bytes}, {"steps", allreduce_steps(bytes, options.steps)}});
  }
  BenchRows rows;
  for (const int64_t ranks : options.devices_or({2})) {
    const UniqueFd memory = shared_memory(ranks * kBoundBytes);
    std::map<std::string, std::vector<Json>> own;  // A result a round.
    std::vector<Json> python;
    Json config = {{"kind", "allreduce"},
                   {"sizes", sizes},
                   {"warmup", kWarmup / 3},
                   {"memory", path_of_memory(memory)}};
    for (int round = 0; round < options.rounds_or_default(); ++round) {
      impl_->progress("allreduce, " + counted(ranks, "rank"), round);
      for (const auto& backend : options.backends) {
        config["backend"] = backend;
        own[backend].push_back(impl_->run_ranks(false, config, ranks));
      }
      if (impl_->python) python.push_back(impl_->run_ranks(true, config, ranks));
    }
    for (size_t i = 0; i < options.sizes.size(); ++i) {
      for (const auto& backend : options.backends) {
        BenchRow row = {{"bytes", options.sizes[i]}, {"ranks", ranks}, {"backend", backend}};
        const Figures figures = of_size(own[backend], "p50_us", i);
        add_comparison(row, "p50_us", figures, of_size(python, "p50_us", i));
        add_bound(row, of_size(own[backend], "bound_us", i), of_size(own[backend], "of_bound", i));
        rows.push_back(row);
      }
    }
  }
  return rows;
}

BenchRows BenchRunner::loader() {
  const auto& options = impl_->options;
  const BenchData data(options.data_dir);
  const int64_t batch_size = options.batch_size_or(64);
  Figures own;
  Figures python;
  const Json config = {{"kind", "loader"},
                       {"backend", "gloo"},
                       {"folder", data.folder().string()},
                       {"batch_size", batch_size},
                       {"workers", 0},
                       {"epochs", 2},
                       {"warmup", kWarmup},
                       {"batches", options.steps}};
  for (int round = 0; round < options.rounds_or_default(); ++round) {
    impl_->progress("loader", round);
    own.push_back(impl_->run_ranks(false, config, 1)["samples_per_s"]);
    if (impl_->python) python.push_back(impl_->run_ranks(true, config, 1)["samples_per_s"]);
  }
  BenchRow row = {{"dataset", data.name()}, {"batch_size", batch_size}, {"workers", 0}};
  add_comparison(row, "samples_per_s", own, python);
  return {row};
}

BenchRows BenchRunner::launch() {
  const auto& options = impl_->options;
  BenchRows rows;
  for (const int64_t ranks : options.devices_or({2})) {
    for (const auto& backend : options.backends) {
      Figures own;
      Figures python;
      for (int round = 0; round < options.rounds_or_default(); ++round) {
        impl_->progress("launch, " + counted(ranks, "rank"), round);
        std::vector<std::string> command = {own_program(), "run", "--nproc-per-node",
                                            std::to_string(ranks)};
        const auto worker = impl_->own_command({{"kind", "launch"}, {"backend", backend}});
        command.insert(command.end(), worker.begin(), worker.end());
        if (backend == "mpi") command = under_mpirun(ranks, worker);
        own.push_back(
            impl_->run_whole(backend == "mpi" ? "mpirun" : "lockstep run", command).seconds);
        if (impl_->python) python.push_back(impl_->torchrun_seconds(ranks));
      }
      BenchRow row = {{"ranks", ranks}, {"backend", backend}};
      add_comparison(row, "seconds", own, python);
      rows.push_back(row);
    }
  }
  return rows;
}

namespace {

/// The accuracy in "test accuracy 0.9731 loss 0.0912", `lockstep train`'s last line.
double accuracy_in(const std::string& output) {
  auto lines = split(output, '\n');
  while (!lines.empty() && lines.back().empty()) lines.pop_back();
  const auto words = split(lines.empty() ? std::string() : lines.back(), ' ');
  if (words.size() > 2 && words[0] == "test" && words[1] == "accuracy") {
    if (const auto value = parse_double(words[2])) return *value;
  }
  throw Error("lockstep train's last line is not 'test accuracy X loss Y': '" +
              (lines.empty() ? std::string() : lines.back()) + "'");
}

}  // namespace

BenchRows BenchRunner::train() {
  const auto& options = impl_->options;
  const BenchData data(options.data_dir);
  const int64_t batch_size = options.batch_size_or(64);
  const int64_t ranks = options.devices_or({2}).front();
  Figures seconds, python_seconds, peak, python_peak, accuracy, python_accuracy;
  for (int round = 0; round < options.rounds_or_default(); ++round) {
    impl_->progress("train", round);
    const std::string& backend = options.backends.front();
    std::vector<std::string> command = {own_program(),  "train",
                                        "--model",      "mlp",
                                        "--dataset",    "mnist",
                                        "--data-dir",   data.folder().string(),
                                        "--backend",    backend,
                                        "--max-epochs", std::to_string(options.epochs),
                                        "--batch-size", std::to_string(batch_size),
                                        "--optimizer",  "sgd",
                                        "--lr",         "0.01",
                                        "--momentum",   "0.9",
                                        "--seed",       "0",
                                        "--threads",    std::to_string(options.threads),
                                        "--bind-to",    options.bind_to,
                                        "--quiet"};
    if (backend == "mpi") {
      command = under_mpirun(ranks, command);
    } else {
      command.insert(command.end(), {"--devices", std::to_string(ranks)});
    }
    const auto own = impl_->run_whole("lockstep train", command);
    seconds.push_back(own.seconds);
    peak.push_back(static_cast<double>(own.peak_bytes));
    accuracy.push_back(accuracy_in(own.out));
    if (!impl_->python) continue;
    const Json config = {{"kind", "train"},
                         {"init_method", "file://" + impl_->fresh("meet")},
                         {"result", impl_->fresh("result")},
                         {"folder", data.folder().string()},
                         {"ranks", ranks},
                         {"epochs", options.epochs},
                         {"batches", 0},
                         {"batch_size", batch_size},
                         {"lr", 0.01},
                         {"momentum", 0.9},
                         {"seed", 0}};
    const auto [twin, result] = impl_->run_python_training(config);
    python_seconds.push_back(twin.seconds);
    python_peak.push_back(static_cast<double>(twin.peak_bytes));
    python_accuracy.push_back(result["accuracy"]);
  }
  BenchRow row = {{"model", "mlp"},
                  {"dataset", data.name()},
                  {"ranks", ranks},
                  {"backend", options.backends.front()},
                  {"epochs", options.epochs}};
  add_comparison(row, "seconds", seconds, python_seconds);
  row["peak_bytes"] = median(peak);
  row["accuracy"] = median(accuracy);
  if (impl_->python) {
    BenchRow memory;
    add_comparison(memory, "peak_bytes", peak, python_peak);
    row["python_peak_bytes"] = memory["python_peak_bytes"];
    row["memory_ratio"] = memory["ratio"];
    row["python_accuracy"] = median(python_accuracy);
  }
  return {row};
}

}  // namespace lockstep::tool
