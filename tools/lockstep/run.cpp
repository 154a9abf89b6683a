#include "commands.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "library.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/temporary_folder.h"
#include "lockstep/base/text.h"
#include "lockstep/launch/binding.h"
#include "lockstep/launch/launcher.h"
#include "lockstep/launch/omp_waiting.h"
#include "lockstep/launch/output.h"
#include "lockstep/launch/rank_environment.h"
#include "lockstep/launch/variables.h"
#include "run_options.h"

namespace lockstep::tool {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* kNoLogs = "/dev/null";  // torchrun's way to say that none are wanted

void say(const std::string& text) {
  log_info("lockstep run: " + text);
}

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
}

std::string prefix_of(const RunOptions& options, int rank, int local_rank) {
  if (options.no_prefix) return {};
  auto prefix = env_string("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE").value_or("[rank${rank}]: ");
  replace_all(prefix, "${role_name}", options.role);
  replace_all(prefix, "${rank}", std::to_string(rank));
  replace_all(prefix, "${local_rank}", std::to_string(local_rank));
  return prefix;
}

/// The folders of one run: <base>/<run id>_<random>/attempt_N/<local rank>, as torchrun lays them
/// out. Without --log-dir they are temporary, unless a log was asked for.
class LogFolders {
 public:
  explicit LogFolders(const RunOptions& options) : discard_(options.log_dir == kNoLogs) {
    bool wants_files = !options.out_filters.empty() || !options.err_filters.empty();
    for (int i = 0; i < options.nproc; ++i) {
      for (const auto streams : {streams_of(options.redirects, i), streams_of(options.tee, i)}) {
        wants_files |= streams.out || streams.err;
      }
    }
    if (discard_ || (options.log_dir.empty() && !wants_files)) return;
    make_run_folder(options.log_dir.empty() ? temporary_folder() : fs::path(options.log_dir),
                    options);
    say("logs are in " + run_folder_.string());
  }

  /// From now on the folders are those of this attempt.
  void begin(int attempt, int nproc) {
    attempt_ = "attempt_" + std::to_string(attempt);
    // Not before: nobody removes it should this process be killed while there is no supervisor.
    scratch_.emplace("lockstep-run");
    for (int i = 0; i < nproc; ++i) fs::create_directories(folder(i));
    fs::create_directories(generations());
  }
  /// For LaunchPlan::generation_folder.
  fs::path generations() const { return scratch() / "generations"; }
  fs::path folder(int local_rank) const {
    return (run_folder_.empty() ? scratch() : run_folder_) / attempt_ / std::to_string(local_rank);
  }
  /// Where a stream is kept; /dev/null with --log-dir /dev/null.
  fs::path file(int local_rank, const char* name) const {
    return discard_ ? fs::path(kNoLogs) : folder(local_rank) / name;
  }
  /// The same for a file of all ranks.
  fs::path shared_file(const char* name) const {
    return discard_ ? fs::path(kNoLogs) : run_folder_ / attempt_ / name;
  }
  /// What is to be removed at the end.
  const fs::path& scratch() const { return scratch_->path(); }

 private:
  void make_run_folder(const fs::path& base, const RunOptions& options) {
    std::error_code failure;
    fs::create_directories(base, failure);
    auto name = options.run_id;
    std::replace(name.begin(), name.end(), '/', '_');
    auto pattern = (fs::absolute(base) / (name + "_XXXXXX")).string();
    if (failure || !mkdtemp(pattern.data())) {
      throw UsageError("--log-dir " + base.string() + ": cannot make a folder there: " +
                           std::strerror(failure ? failure.value() : errno),
                       "choose a folder that you may write to; without --log-dir none is needed");
    }
    run_folder_ = pattern;
  }

  bool discard_;
  std::optional<TemporaryDirectory> scratch_;  ///< Of the attempt.
  fs::path run_folder_;                        ///< Empty: scratch_.
  std::string attempt_;
};

/// What becomes of one stream, `own_fd` of ours, of one worker.
struct StreamWishes {
  bool redirected, teed, shown, alone, copied;
};

launch::StreamPlan stream_plan(const StreamWishes& wishes, int own_fd, const fs::path& file) {
  launch::StreamPlan plan;
  plan.console = wishes.shown && (wishes.teed || !wishes.redirected);
  if (wishes.redirected || wishes.teed) plan.file = file;
  plan.inherit =
      wishes.alone && !wishes.copied && plan.console && plan.file.empty() && isatty(own_fd) != 0;
  return plan;
}

/// Each worker sees its own GPU only, as torchrun has it.
void make_local_rank_virtual(launch::WorkerPlan& plan) {
  std::string device = std::to_string(plan.local_rank);
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) {
    const auto devices = split(visible, ',');
    if (static_cast<size_t>(plan.local_rank) >= devices.size()) {
      throw UsageError("--virtual-local-rank: no GPU for local rank " + device +
                           " in CUDA_VISIBLE_DEVICES=" + visible,
                       "start fewer ranks, or name more GPUs");
    }
    device = devices[static_cast<size_t>(plan.local_rank)];
    std::erase(device, ' ');
  }
  for (auto& [name, value] : plan.env) {
    if (name == "LOCAL_RANK") value = "0";
  }
  plan.env.emplace_back("CUDA_VISIBLE_DEVICES", device);
}

launch::WorkerPlan worker_plan(const RunOptions& options, const launch::RankLayout& layout,
                               const launch::Program& program, const LogFolders& logs,
                               int local_rank) {
  launch::WorkerPlan plan;
  plan.rank = layout.first_rank + local_rank;
  plan.local_rank = local_rank;
  plan.file = program.file;
  plan.argv = program.argv;
  plan.prefix = prefix_of(options, plan.rank, local_rank);
  plan.error_file = logs.folder(local_rank) / "error.json";
  plan.env = launch::rank_environment(layout, local_rank, plan.error_file.string());
  plan.env.emplace_back("TORCHELASTIC_SIGNALS_TO_HANDLE", options.signal_names);
  plan.unset = {launch::kSpawnVariable, launch::kSpawnCallVariable};
  const auto redirected = streams_of(options.redirects, local_rank);
  const auto teed = streams_of(options.tee, local_rank);
  const bool shown = options.shown.empty() || options.shown.count(local_rank) > 0;
  const bool alone = layout.world_size == 1;
  plan.out = stream_plan({redirected.out, teed.out, shown, alone, !options.out_filters.empty()},
                         STDOUT_FILENO, logs.file(local_rank, "stdout.log"));
  plan.err = stream_plan({redirected.err, teed.err, shown, alone, !options.err_filters.empty()},
                         STDERR_FILENO, logs.file(local_rank, "stderr.log"));
  plan.inherit_stdin = plan.rank == options.stdin_rank && launch::input_is_ours();
  plan.out.prompts = plan.err.prompts = plan.inherit_stdin && isatty(STDIN_FILENO) != 0;
  if (options.virtual_local_rank) make_local_rank_virtual(plan);
  return plan;
}

/// On a single host.
launch::RankLayout layout_of(const RunOptions& options) {
  launch::RankLayout layout;
  layout.local_size = layout.world_size = options.nproc;
  layout.master_addr = options.master_addr;
  layout.master_port = options.master_port.value_or(0);
  layout.run_id = options.run_id;
  layout.role = options.role;
  layout.max_restarts = options.max_restarts;
  return layout;
}

launch::RankLayout layout_of(const RunOptions& options, const launch::HostGeneration& generation) {
  launch::RankLayout layout = layout_of(options);
  layout.first_rank = generation.first_rank;
  layout.world_size = generation.world_size;
  layout.node_rank = generation.node_rank;
  layout.nodes = generation.nodes;
  layout.master_addr = generation.master_addr;
  layout.master_port = generation.master_port;
  layout.restart_count = generation.restarts;
  return layout;
}

constexpr const char* kBackends[] = {"static", "c10d", "etcd"};

/// As Python has it: -N after signal N.
Json exit_code_of(const launch::WorkerEvent& worker) {
  if (!worker.end || worker.end->start_errno != 0) return {};
  const int status = worker.end->wait_status;
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

/// torchrun's events, as lines of JSON on standard error with --event-log-handler console: the
/// hosts have met (RENDEZVOUS), a worker starts or ends, this host's part ends. Three are ours: all
/// ranks start again (RESTART); one is replaced while the others live on (REPLACEMENT); hosts have
/// come or gone, or the others go on without one (MEMBERSHIP_CHANGE). Fields, and lists of one, are
/// torchrun's; the times are set.
class EventLog {
 public:
  /// `options` must outlive it.
  explicit EventLog(const RunOptions& options) : options_(options) {}
  /// The ranks are about to start. `live_on`: or some, beside those that live.
  void begin(const launch::RankLayout& layout, bool live_on = false);
  void tell(const launch::WorkerEvent& worker);
  /// `error`: empty after a success.
  void end(const std::string& error) const;

 private:
  void write(const std::string& state, const std::string& error,
             const launch::WorkerEvent* worker) const;

  const RunOptions& options_;
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  launch::RankLayout layout_;
  bool begun_ = false;
};

void EventLog::begin(const launch::RankLayout& layout, bool live_on) {
  const bool restarts = layout.restart_count > layout_.restart_count;
  layout_ = layout;
  const char* again = !restarts ? "MEMBERSHIP_CHANGE" : live_on ? "REPLACEMENT" : "RESTART";
  write(std::exchange(begun_, true) ? again : "RENDEZVOUS", "", nullptr);
}

void EventLog::tell(const launch::WorkerEvent& worker) {
  if (!worker.end) return write("START", "", &worker);
  if (worker.end->succeeded()) return write("SUCCEEDED", "", &worker);
  write(worker.end->after_stop ? "TERMINATED" : "FAILED", worker.error, &worker);
  // On several hosts the next generation tells it.
  if (!worker.others_go_on || options_.has_meeting()) return;
  if (worker.is_replaced) ++layout_.restart_count;
  write(worker.is_replaced ? "REPLACEMENT" : "MEMBERSHIP_CHANGE", "", nullptr);
}

void EventLog::end(const std::string& error) const {
  write(error.empty() ? "SUCCEEDED" : "FAILED", error, nullptr);
}

void EventLog::write(const std::string& state, const std::string& error,
                     const launch::WorkerEvent* worker) const {
  if (options_.event_log != "console") return;
  using namespace std::chrono;
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  Json details = {{"group_world_size", layout_.nodes},
                  {"entry_point", fs::path(options_.program.front()).filename().string()}};
  Json rank, id;
  if (worker) {
    rank = layout_.first_rank + worker->local_rank;
    id = std::to_string(worker->pid);
    details["local_rank"] = Json::array({worker->local_rank});
    details["role_rank"] = Json::array({rank});
    details["role_world_size"] = Json::array({layout_.world_size});
    details["exit_code"] = Json::array({exit_code_of(*worker)});
    details["worker_pid"] = Json::array({worker->pid});
  }
  const auto dump = [](const Json& json) {
    return json.dump(-1, ' ', false, Json::error_handler_t::replace);
  };
  const auto now = system_clock::now().time_since_epoch();
  const Json event = {
      {"name", "torchelastic.worker.status." + state},
      {"source", worker ? "WORKER" : "AGENT"},
      {"timestamp", duration_cast<milliseconds>(now).count()},
      {"metadata",
       {{"run_id", options_.run_id},
        {"global_rank", rank},
        {"group_rank", layout_.node_rank},
        {"worker_id", id},
        {"role", options_.role},
        {"hostname", host},
        {"state", state},
        {"total_run_time", duration_cast<seconds>(steady_clock::now() - started_).count()},
        {"rdzv_backend", kBackends[static_cast<int>(options_.meeting.backend)]},
        {"raw_error", error.empty() ? Json() : Json(dump({{"message", error}}))},
        {"metadata", dump(details)},
        {"agent_restarts", layout_.restart_count},
        {"duration_ms", Json()}}}};
  std::fputs((dump(event) + "\n").c_str(), stderr);
}

std::vector<launch::Binding> bindings_of(const RunOptions& options) {
  const auto topology = launch::read_topology();
  std::vector<launch::Binding> bindings;
  for (int rank = 0; rank < options.nproc; ++rank)
    bindings.push_back(launch::choose_binding({options.bind_to, rank, options.nproc}, topology));
  return bindings;
}

launch::LaunchPlan launch_plan(const RunOptions& options, const launch::RankLayout& layout,
                               const launch::Program& program, const LogFolders& logs,
                               const std::vector<launch::Binding>& bindings) {
  launch::LaunchPlan plan;
  for (int i = 0; i < options.nproc; ++i) {
    plan.workers.push_back(worker_plan(options, layout, program, logs, i));
    plan.workers.back().processors = bindings[static_cast<size_t>(i)].processors;
  }
  if (!options.out_filters.empty())
    plan.out_copies = {logs.shared_file("filtered_stdout.log"), options.out_filters};
  if (!options.err_filters.empty())
    plan.err_copies = {logs.shared_file("filtered_stderr.log"), options.err_filters};
  plan.scratch = logs.scratch();
  plan.repeat_shown_lines = false;
  plan.job = launch::job_options(options.shutdown_timeout);
  plan.signals = options.signals;
  plan.told_by = "lockstep run: ";
  plan.how_to_go_on =
      "with --max-restarts N all ranks start again; a program that saves snapshots goes on from "
      "the last one, also when the same command is given again";
  return plan;
}

/// A job of this host alone.
void run_here(const RunOptions& options, LogFolders& logs,
              const std::function<launch::LaunchPlan(const launch::RankLayout&)>& plan_of,
              EventLog&) {
  launch::RankLayout layout = layout_of(options);
  UniqueFd listener = launch::listen_for_ranks(layout);
  const auto attempt_plan = [&](int attempt) {
    if (attempt > 0) {
      // Nothing that the ranks of the attempt before have left in their store is there.
      layout = layout_of(options);
      layout.restart_count = attempt;
      listener = launch::listen_for_ranks(layout);
    }
    logs.begin(attempt, options.nproc);
    auto plan = plan_of(layout);
    plan.serve = [&] {
      std::shared_ptr<void> store;
      library_function<decltype(lockstep_cli_host_store)>(
          "liblockstep_cli.so", "lockstep_cli_host_store")(listener.release(), store);
      return store;
    };
    plan.generation_folder = logs.generations();
    return plan;
  };
  launch::launch(attempt_plan, options.max_restarts);
}

/// This host's part in a job of several.
void run_with_others(const RunOptions& options, LogFolders& logs,
                     const std::function<launch::LaunchPlan(const launch::RankLayout&)>& plan_of,
                     EventLog& events) {
  std::shared_ptr<launch::HostAgent> agent;
  library_function<decltype(lockstep_hosts_join)>("liblockstep_hosts.so", "lockstep_hosts_join")(
      options, agent);
  int attempt = 0;
  launch::launch(*agent, options.signals, [&](const launch::HostGeneration& generation) {
    logs.begin(attempt++, options.nproc);
    auto plan = plan_of(layout_of(options, generation));
    plan.on_generation = [&](const launch::HostGeneration& next) {
      events.begin(layout_of(options, next), true);
    };
    if (options.max_restarts > 0 || options.min_nodes < options.nodes)
      plan.generation_folder = logs.generations();
    return plan;
  });
}

}  // namespace

int run_command(const std::vector<std::string>& args) {
  const auto options = parse_run_options(args);
  if (!options) return kExitSuccess;
  for (const auto& text : options->without_effect) say(text);
  const auto program = launch::find_program(options->program, options->kind);
  launch::RankLayout most = layout_of(*options);
  most.nodes = options->nodes;
  most.world_size = options->nodes * options->nproc;
  launch::make_room_for_ranks(most);
  const bool sets_threads = options->nproc > 1 && !std::getenv("OMP_NUM_THREADS");
  // Once for a job, and for those who look: in a log of a thousand jobs it is no news.
  if (sets_threads && options->node_rank.value_or(0) == 0 && isatty(STDERR_FILENO)) {
    say("OMP_NUM_THREADS is set to 1 in every worker; set it yourself for more threads per rank");
  }
  const auto bindings = bindings_of(*options);
  LogFolders logs(*options);
  // Here, as the environment must not change once there are threads.
  launch::choose_omp_waiting();
  EventLog events(*options);
  const auto plan_of = [&](const launch::RankLayout& layout) {
    events.begin(layout);
    auto plan = launch_plan(*options, layout, program, logs, bindings);
    plan.on_worker = [&](const launch::WorkerEvent& worker) { events.tell(worker); };
    return plan;
  };
  try {
    (options->has_meeting() ? run_with_others : run_here)(*options, logs, plan_of, events);
  } catch (const std::exception& error) {
    events.end(error.what());
    throw;
  }
  events.end("");
  return kExitSuccess;
}

}  // namespace lockstep::tool
