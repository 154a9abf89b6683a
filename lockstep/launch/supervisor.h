#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/file.h"

namespace lockstep::launch {

/// A process to start.
struct ProcessPlan {
  std::string file;               ///< What is executed: a path.
  std::vector<std::string> argv;  ///< argv[0] included.
  std::vector<std::string> env;   ///< The whole environment, "NAME=value".
  int stdout_fd = 1;  ///< Not owned; must stay open until the Supervisor is constructed.
  int stderr_fd = 2;
  std::vector<int> processors = {};  ///< That it may run on; empty: those that we may.
  bool inherit_stdin = false;        ///< It reads what we would; else /dev/null.
  /// Called in a fork of this process in place of executing `file`. Its result is the exit code.
  /// It sees `env` as its own and this process's command line, and must not throw. Only where
  /// `forks_can_go_on`.
  std::function<int()> body = {};
};

/// Whether a fork of this process may do anything that the process itself may: no other thread runs
/// here, and OpenMP has not tied this thread to a processor.
bool forks_can_go_on();

/// What the supervisor reports.
struct SupervisorEvent {
  enum Kind : int32_t { started, not_started, ended };
  Kind kind;
  int32_t index;  ///< Which process of the plan.
  int32_t value;  ///< The process's id, the errno of execve, or waitpid's status.
};

/// Starts processes through a small process between them and us, so that none of them, and none of
/// their descendants, outlives us.
///
/// The supervisor is a fork of this process without any of its threads. It is the workers' parent
/// and the "child subreaper" of all they start. Even a descendant that forks twice, changes session
/// and clears its environment stays below it in the process tree. It reads a pipe whose other end
/// only this process holds. The pipe closes by `finish`, by the destructor, or because this process
/// was killed. Then the supervisor kills everything below it, removes the scratch folder and ends.
/// It has left our session and process group, so signals from the terminal do not reach it or the
/// workers. Should the supervisor itself be killed, the kernel kills the workers
/// (PR_SET_PDEATHSIG).
///
/// Each worker is the leader of a process group and has only descriptors 0 to 2. A terminal that it
/// reads is not its controlling one, so it may read it and change its settings at any time.
/// Of signals it ignores HUP, INT and QUIT where this process does (nohup, background jobs).
class Supervisor {
 public:
  /// Throws SystemError when there are no processes or descriptors left. `scratch` is a folder to
  /// remove at the end. Empty: none. `restarts`: `start_again` will be called, so the workers'
  /// output stays open until the supervisor ends.
  Supervisor(const std::vector<ProcessPlan>& processes, const std::filesystem::path& scratch,
             bool restarts = false);
  /// Kills what is left and waits for the supervisor's end.
  ~Supervisor();
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  /// Readable when `next` has something to say.
  int event_fd() const { return events_.get(); }
  /// The next event. None when there is none now. Does not block.
  std::optional<SupervisorEvent> next();
  /// True once `next` has found the supervisor gone.
  bool gone() const { return gone_; }
  /// Sends a signal to the process groups of all workers that live; USR1 and USR2 to the workers
  /// alone.
  void signal_all(int signal);
  /// Starts process `index` of the plan anew, of which `ended` or `not_started` was reported.
  void start_again(int index);
  /// Has the supervisor kill what is left and end. Does not wait.
  void finish() { control_.reset(); }

 private:
  void give(int32_t kind, int value);

  UniqueFd control_;
  UniqueFd events_;
  pid_t pid_ = -1;
  bool gone_ = false;
};

}  // namespace lockstep::launch
