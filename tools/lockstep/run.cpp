#include "run.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>

#include "library.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/launch/binding.h"
#include "lockstep/launch/launcher.h"
#include "lockstep/launch/rank_environment.h"
#include "lockstep/launch/variables.h"
#include "run_options.h"

namespace lockstep::tool {
namespace {

namespace fs = std::filesystem;

constexpr const char* kNoLogs = "/dev/null";  // torchrun's way to say that none are wanted
/// How long host 0 keeps the store for hosts whose workers have not ended; torchrun's limit.
constexpr std::chrono::seconds kLastHostLimit{300};

void say(const std::string& text) {
  log_info("lockstep run: " + text);
}

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
}

std::string prefix_of(const RunOptions& options, int rank, int local_rank) {
  auto prefix = env_string("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE").value_or("[rank${rank}]: ");
  replace_all(prefix, "${role_name}", options.role);
  replace_all(prefix, "${rank}", std::to_string(rank));
  replace_all(prefix, "${local_rank}", std::to_string(local_rank));
  return prefix;
}

/// The folders of one run: <base>/<run id>_<random>/attempt_0/<local rank>, as torchrun lays them
/// out. Without --log-dir they are temporary, unless a log was asked for.
class LogFolders {
 public:
  explicit LogFolders(const RunOptions& options) : discard_(options.log_dir == kNoLogs) {
    bool wants_files = false;
    for (int i = 0; i < options.nproc; ++i) {
      for (const auto streams : {options.redirects.of(i), options.tee.of(i)}) {
        wants_files |= streams.out || streams.err;
      }
    }
    if (!options.log_dir.empty() && !discard_) {
      make_run_folder(options.log_dir, options);
      say("logs are in " + run_folder_.string());
    } else if (wants_files && !discard_) {
      make_run_folder(fs::temp_directory_path(), options);
      say("logs are in " + run_folder_.string());
    } else {
      scratch_ = std::make_unique<TemporaryDirectory>("lockstep-run");
      run_folder_ = scratch_->path();
    }
    for (int i = 0; i < options.nproc; ++i) fs::create_directories(folder(i));
  }

  fs::path folder(int local_rank) const {
    return run_folder_ / "attempt_0" / std::to_string(local_rank);
  }
  /// Where a stream is kept; /dev/null with --log-dir /dev/null.
  fs::path file(int local_rank, const char* name) const {
    return discard_ ? fs::path(kNoLogs) : folder(local_rank) / name;
  }
  /// What is to be removed at the end; empty: nothing.
  fs::path scratch() const { return scratch_ ? scratch_->path() : fs::path(); }

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
  std::unique_ptr<TemporaryDirectory> scratch_;
  fs::path run_folder_;
};

launch::StreamPlan stream_plan(bool redirected, bool teed, bool shown, const fs::path& file) {
  launch::StreamPlan plan;
  plan.console = shown && (teed || !redirected);
  if (redirected || teed) plan.file = file;
  return plan;
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
  plan.unset = {launch::kSpawnVariable, launch::kSpawnCallVariable, "LOCKSTEP_LAUNCHER"};
  const auto redirected = options.redirects.of(local_rank);
  const auto teed = options.tee.of(local_rank);
  const bool shown = options.shown.empty() || options.shown.count(local_rank) > 0;
  plan.out = stream_plan(redirected.out, teed.out, shown, logs.file(local_rank, "stdout.log"));
  plan.err = stream_plan(redirected.err, teed.err, shown, logs.file(local_rank, "stderr.log"));
  return plan;
}

launch::RankLayout layout_of(const RunOptions& options) {
  launch::RankLayout layout;
  layout.local_size = options.nproc;
  layout.first_rank = options.node_rank * options.nproc;
  layout.world_size = options.nodes * options.nproc;
  layout.node_rank = options.node_rank;
  layout.nodes = options.nodes;
  layout.master_addr = options.master_addr;
  layout.master_port = options.master_port.value_or(0);
  layout.run_id = options.run_id;
  layout.role = options.role;
  return layout;
}

/// The hosts of a job tell host 0 when their workers have ended, because it serves the store.
class LastHost {
 public:
  explicit LastHost(const launch::RankLayout& layout) : layout_(layout) {}

  bool may_leave() {
    const auto now = std::chrono::steady_clock::now();
    if (!since_) since_ = now;
    if (now - *since_ > kLastHostLimit) {
      log_warning(
          "lockstep run: not all hosts said that their ranks have ended; the store is closed all "
          "the same");
      return true;
    }
    return count_ended_hosts(layout_.master_addr, layout_.master_port, 0) >= layout_.nodes - 1;
  }

  /// Without effect when host 0 has gone before.
  void tell() noexcept {
    try {
      count_ended_hosts(layout_.master_addr, layout_.master_port, 1);
    } catch (const std::exception&) {
    }
  }

 private:
  const launch::RankLayout& layout_;
  std::optional<std::chrono::steady_clock::time_point> since_;
};

void launch_as_other_host(const launch::LaunchPlan& plan, LastHost& last_host) {
  try {
    launch::launch(plan);
  } catch (const InterruptedError&) {
    throw;
  } catch (...) {
    last_host.tell();
    throw;
  }
  last_host.tell();
}

}  // namespace

int run_command(const std::vector<std::string>& args) {
  const auto options = parse_run_options(args);
  if (!options) return kExitSuccess;
  const auto program = launch::find_program(options->program, options->kind);
  auto layout = layout_of(*options);
  const bool serves = options->node_rank == 0;
  UniqueFd listener;
  if (serves) listener = launch::listen_for_ranks(layout);
  if (options->nproc > 1 && !std::getenv("OMP_NUM_THREADS")) {
    say("OMP_NUM_THREADS is set to 1 in every worker; set it yourself for more threads per rank");
  }
  const LogFolders logs(*options);
  launch::LaunchPlan plan;
  launch::BindingRequest binding;
  binding.word = options->bind_to;
  binding.local_size = options->nproc;
  const auto bindings = launch::choose_bindings(binding);
  for (int i = 0; i < options->nproc; ++i) {
    plan.workers.push_back(worker_plan(*options, layout, program, logs, i));
    plan.workers.back().processors = bindings[static_cast<size_t>(i)].processors;
  }
  plan.scratch = logs.scratch();
  plan.owns_process = true;
  plan.grace = options->grace;
  plan.signals = options->signals;
  LastHost last_host(layout);
  if (!serves) {
    launch_as_other_host(plan, last_host);
    return kExitSuccess;
  }
  plan.serve = [&] { return serve_store(listener.release()); };
  if (options->nodes > 1) plan.may_leave = [&] { return last_host.may_leave(); };
  launch::launch(plan);
  return kExitSuccess;
}

}  // namespace lockstep::tool
