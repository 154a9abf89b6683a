#pragma once

#include <sys/types.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/cgroup.h"
#include "lockstep/launch/error_file.h"
#include "lockstep/launch/host_agent.h"
#include "lockstep/launch/job.h"

namespace lockstep::launch {

/// Where one of a worker's two output streams goes. Any combination.
struct StreamPlan {
  bool inherit = false;        ///< The worker gets our own descriptor; nothing else then applies.
  bool console = false;        ///< To the same stream of ours, in whole lines with the prefix.
  std::filesystem::path file;  ///< Bytes as they come; empty: no file.
  bool prompts = false;        ///< The console also gets a line that stays unfinished: a question.
};

/// Which lines of the console are copied into a file: those that contain one of `words`.
struct LineCopiesPlan {
  std::filesystem::path file;  ///< Empty: none are.
  std::vector<std::string> words;
};

/// A process to run as a rank.
struct WorkerPlan {
  int rank = 0;
  int local_rank = 0;
  std::string file;  ///< The path that is executed.
  std::vector<std::string> argv;
  /// On top of our own environment. An empty value with `unset` removes the name.
  std::vector<std::pair<std::string, std::string>> env;
  std::vector<std::string> unset;
  std::vector<int> processors;  ///< That it may run on; empty: those that we may.
  std::string prefix;           ///< Before each line on the console: "[rank0]: "; may be empty.
  bool inherit_stdin = false;   ///< It reads our standard input; else /dev/null.
  StreamPlan out;
  StreamPlan err;
  std::function<int()> body = {};    ///< See ProcessPlan; `file` is its program then, too.
  std::filesystem::path error_file;  ///< Where the worker reports its failure; read at the end.
};

/// A worker has started, or has ended.
struct WorkerEvent {
  int local_rank = 0;
  pid_t pid = -1;                     ///< -1: it could not be executed.
  std::optional<WorkerEnd> end = {};  ///< None: it has started.
  std::string error = {};             ///< Of one that failed: WorkerFailure::line.
  bool others_go_on = false;          ///< Of one that failed: LaunchPlan::generation_folder.
  bool is_replaced = false;           ///< And a new process takes its place.
};

struct LaunchPlan {
  std::vector<WorkerPlan> workers;
  /// Is told of each worker's start and end, by the thread that called `launch`. May be empty.
  std::function<void(const WorkerEvent&)> on_worker = {};
  /// Serves what the workers connect to. Called once, right after they were started, on a thread of
  /// its own. So its own start and theirs overlap. What it returns lives until they have ended. May
  /// be empty.
  std::function<std::shared_ptr<void>()> serve;
  /// What is shown of the workers' standard output and error is copied there in parts.
  LineCopiesPlan out_copies, err_copies;
  /// The last lines of a failed worker are part of the error also where they were shown just
  /// before.
  bool repeat_shown_lines = true;
  /// Of a worker that reported its failure and exited, that report is the error: "rank 1: no file".
  bool reports_suffice = false;
  std::filesystem::path
      scratch;            ///< A folder to remove at the end, however it comes; may be empty.
  Job::Options job = {};  ///< How long workers may take to end.
  std::vector<int> signals = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};  ///< Those that are forwarded.
  /// The GenerationFolder, which workers find by kGenerationFolderVariable. When one fails of
  /// itself, the others go on without it if they have announced that they can, and a new process
  /// takes its place while restarts are left. On several hosts all of them begin the next
  /// generation, and who lives goes on there. Empty: a failure ends the attempt.
  std::filesystem::path generation_folder = {};
  /// Is told of each generation of several hosts in which the workers go on. May be empty.
  std::function<void(const HostGeneration&)> on_generation = {};
  /// Of standard output that goes to the console, only that of the generation's rank 0 does.
  bool shows_first_member = false;
  std::string told_by = {};  ///< Before a line about a restart: "lockstep run: "; may be empty.
  /// How the user goes on after a worker was killed by a signal and no restart was asked for.
  std::string how_to_go_on = {};
};

/// The failure that brought the job down.
struct WorkerFailure {
  int rank = 0;
  int local_rank = 0;
  pid_t pid = -1;
  int wait_status = 0;  ///< As waitpid gives it.
  int start_errno = 0;  ///< Not 0: it could not be executed.
  std::string file;     ///< The program.
  std::optional<ErrorReport> report;
  std::vector<std::string> last_lines;  ///< Of its standard error.
  bool lines_are_shown = false;         ///< They stand on the console already.
  bool report_suffices = false;         ///< See LaunchPlan::reports_suffice.
  std::string memory;  ///< Words for the memory limit at which it was killed; empty: it was not.
  std::filesystem::path error_log;  ///< Its whole standard error, if kept in a file.

  /// The worker's exit code, or 128 + N when signal N ended it. When it could not be executed, 126
  /// or 127, as in a shell.
  int exit_code() const;
  /// "rank 1 (pid 4711) was killed by SIGSEGV (signal 11)" and what it said itself. Or that alone.
  std::string text() const;
  /// The same in one line.
  std::string line() const;

 private:
  std::string ending() const;
  bool report_is_all() const;
};

/// What the end of a worker by SIGKILL says when the kernel has killed for want of memory since
/// `before`: " at the memory limit of its cgroup, 2 GB (peak 2 GB)". Else empty.
std::string memory_words(const MemoryUse& before, const MemoryUse& now);

/// Runs the workers to their end, and again after a failure, up to `max_restarts` times. Not where
/// that cannot help: the program cannot be executed, or exit code 2 tells of wrong arguments.
/// `plan_of` gives the plan of each attempt, from 0, when nothing of the one before is left. What
/// it holds outlives the attempt. A worker that is replaced while the others live on
/// (LaunchPlan::generation_folder) counts as a restart. Returns when all succeeded. Throws
/// - WorkerError when one failed. The others got TERM and, after Job::Options::grace, KILL. It
///   tells the last attempt's failure, and those before in a line each.
/// - InterruptedError when one of `signals` came. It was forwarded, and KILL followed after
///   Job::Options::signal_grace or at the second signal.
/// - SystemError(EPIPE) when nobody reads our output any more. The workers were told to stop.
/// - what `serve` throws, after the workers are gone.
/// In each case no worker and no descendant of one is left.
void launch(const std::function<LaunchPlan(int attempt)>& plan_of, int max_restarts);
/// The same for a host of a job that several share: runs the workers whenever `agent` says so, and
/// stops them when it says so. `plan_of` gives the plan of each generation in which workers start
/// anew, with these `signals`.
/// Returns and throws when the job has ended, as above.
void launch(HostAgent& agent, const std::vector<int>& signals,
            const std::function<LaunchPlan(const HostGeneration&)>& plan_of);

}  // namespace lockstep::launch
