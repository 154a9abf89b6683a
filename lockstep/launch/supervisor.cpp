#include "lockstep/launch/supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/launch/signals.h"

namespace lockstep::launch {
namespace {

constexpr std::chrono::seconds kKillLimit{5};

/// What the supervisor is told through its pipe.
struct Order {
  enum Kind : int32_t { signal_all, start_again };
  Kind kind;
  int32_t value;  ///< The signal, or which process of the plan.
};

/// Closes every descriptor above 2 that is not in `kept`.
void close_others(std::vector<int> kept) {
  std::sort(kept.begin(), kept.end());
  int next = 3;
  for (const int fd : kept) {
    while (next < fd) ::close(next++);
    next = std::max(next, fd + 1);
  }
  ::closefrom(next);
}

void reset_signals(const std::vector<int>& ignored) {
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction action {};
    const bool ignore = std::find(ignored.begin(), ignored.end(), signal) != ignored.end();
    action.sa_handler = ignore ? SIG_IGN : SIG_DFL;
    sigaction(signal, &action, nullptr);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

std::vector<char*> pointers(const std::vector<std::string>& words) {
  std::vector<char*> list;
  for (const auto& word : words) list.push_back(const_cast<char*>(word.c_str()));
  list.push_back(nullptr);
  return list;
}

bool run_on(const std::vector<int>& processors) {
  try {
    set_allowed_processors(processors);
    return true;
  } catch (const SystemError& error) {
    errno = error.errno_value();
    return false;
  }
}

/// The fields of proc(5)'s stat from the third on: the state, the parent, ... Empty where the
/// process is gone.
std::vector<std::string> stat_of(const std::string& process) {
  char text[2048];
  const UniqueFd file(::open(("/proc/" + process + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  const ssize_t size = file ? ::read(file.get(), text, sizeof text - 1) : -1;
  const std::string_view line(text, static_cast<size_t>(std::max<ssize_t>(size, 0)));
  const size_t name_end = line.rfind(") ");
  return name_end == line.npos ? std::vector<std::string>() : split(line.substr(name_end + 2), ' ');
}

/// Kills everything below this process and reaps it. As a child subreaper it becomes the parent of
/// what it makes an orphan. Gives up after `limit`: a process that waits in the kernel for a dead
/// disk does not end.
void kill_descendants(std::chrono::milliseconds limit) {
  const auto self = std::to_string(getpid());
  const auto end = std::chrono::steady_clock::now() + limit;
  while (std::chrono::steady_clock::now() < end) {
    pid_t reaped = 0;
    do {
      reaped = waitpid(-1, nullptr, WNOHANG);
    } while (reaped > 0);
    if (reaped < 0) return;  // Who has no child has nothing below.
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      const std::string process = entry.path().filename();
      const auto pid = parse_int(process);
      const auto stat = pid ? stat_of(process) : std::vector<std::string>();
      if (stat.size() > 1 && stat[1] == self) ::kill(static_cast<pid_t>(*pid), SIGKILL);
    }
    constexpr timespec kPause{0, 2'000'000};
    nanosleep(&kPause, nullptr);
  }
}

/// The process that the supervisor becomes. It only makes system calls and allocates: after a fork
/// of a process with threads, nothing else of it is safe to touch.
class SupervisorProcess {
 public:
  SupervisorProcess(const std::vector<ProcessPlan>& plans, const std::filesystem::path& scratch,
                    bool restarts, int control, int events, std::vector<int> ignored)
      : plans_(plans),
        scratch_(scratch),
        restarts_(restarts),
        control_(control),
        events_(events),
        ignored_(std::move(ignored)),
        pids_(plans_.size(), -1) {}

  [[noreturn]] void run() {
    become_supervisor();
    for (size_t i = 0; i < plans_.size(); ++i) start(static_cast<int>(i));
    let_go_of_output();
    watch();
    kill_descendants(kKillLimit);
    std::error_code ignored;
    if (!scratch_.empty()) std::filesystem::remove_all(scratch_, ignored);
    _exit(0);
  }

 private:
  void become_supervisor() {
    setsid();
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    prctl(PR_SET_NAME, "supervisor");
    std::vector<int> kept = {control_, events_};
    for (const auto& plan : plans_) kept.insert(kept.end(), {plan.stdout_fd, plan.stderr_fd});
    close_others(kept);
    // Blocked and not ignored: a worker that is signalled before it has put its own handling in
    // place must find the signal pending.
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, nullptr);
    ::signal(SIGCHLD, SIG_DFL);
    sigset_t children;
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    // The pipe tells of our starter's end, unless another thread of it had just forked and so left
    // a copy of the pipe's end in some other process.
    starter_ = static_cast<int>(syscall(SYS_pidfd_open, getppid(), 0));
    child_signals_ = signalfd(-1, &children, SFD_CLOEXEC | SFD_NONBLOCK);
  }

  void report(SupervisorEvent::Kind kind, int index, int value) {
    const SupervisorEvent event{kind, index, value};
    // The pipe holds thousands of events and a reader that is gone also closed the control pipe.
    [[maybe_unused]] const auto written = ::write(events_, &event, sizeof event);
  }

  void start(int index) {
    const auto& plan = plans_[static_cast<size_t>(index)];
    const pid_t supervisor = getpid();
    const pid_t pid = fork();
    if (pid < 0) return report(SupervisorEvent::not_started, index, errno);
    if (pid == 0) {
      become_worker(plan, supervisor);
      report(SupervisorEvent::not_started, index, errno);
      _exit(127);
    }
    setpgid(pid, pid);  // here and in the child: neither may come too late
    pids_[static_cast<size_t>(index)] = pid;
    report(SupervisorEvent::started, index, pid);
  }

  /// Returns only when the program cannot be executed, with errno set.
  void become_worker(const ProcessPlan& plan, pid_t supervisor) const {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != supervisor) _exit(127);
    reset_signals(ignored_);
    const auto argv = pointers(plan.argv);
    const auto env = pointers(plan.env);
    const int input = plan.inherit_stdin ? fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3)
                                         : ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    // Copies above 2 first, so that one of 1 and 2 does not overwrite the other.
    const int out = fcntl(plan.stdout_fd, F_DUPFD_CLOEXEC, 3);
    const int err = fcntl(plan.stderr_fd, F_DUPFD_CLOEXEC, 3);
    if (input < 0 || out < 0 || err < 0) return;
    dup2(input, STDIN_FILENO);
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    fcntl(events_, F_SETFD, FD_CLOEXEC);
    close_others({events_});
    if (!plan.processors.empty() && !run_on(plan.processors)) return;
    if (plan.body) go_on(plan);
    execve(plan.file.c_str(), argv.data(), env.data());
  }

  /// What execve would do to this process, and then the body.
  [[noreturn]] void go_on(const ProcessPlan& plan) const {
    ::close(events_);
    clearenv();
    for (const auto& variable : plan.env) putenv(const_cast<char*>(variable.c_str()));
    prctl(PR_SET_NAME, program_invocation_short_name);
    const int code = plan.body();
    std::fflush(nullptr);
    _exit(code);
  }

  /// Whoever reads our output must see its end when all workers have closed it.
  void let_go_of_output() {
    if (restarts_) return;
    const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(nothing, fd);
    close_others({control_, events_, child_signals_, starter_});
  }

  void watch() {
    while (true) {
      reap();
      pollfd fds[] = {{control_, POLLIN, 0}, {child_signals_, POLLIN, 0}, {starter_, POLLIN, 0}};
      if (::poll(fds, 3, -1) < 0 && errno != EINTR) return;
      drain_child_signals();
      if (fds[2].revents != 0) return;
      if (fds[0].revents == 0) continue;
      Order order{};
      const ssize_t size = ::read(control_, &order, sizeof order);
      if (size < 0 && errno == EINTR) continue;
      if (size != sizeof order) return;
      order.kind == Order::start_again ? start(order.value) : signal_all(order.value);
    }
  }

  void signal_all(int signal) const {
    for (const pid_t pid : pids_) {
      // A child of the worker's would die of a message.
      if (pid > 0) ::kill(is_message(signal) ? pid : -pid, signal);
    }
  }

  void drain_child_signals() const {
    signalfd_siginfo info;
    while (::read(child_signals_, &info, sizeof info) > 0) {
    }
  }

  void reap() {
    int status = 0;
    pid_t pid = 0;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
      const auto found = std::find(pids_.begin(), pids_.end(), pid);
      if (found == pids_.end()) continue;
      *found = -1;
      report(SupervisorEvent::ended, static_cast<int>(found - pids_.begin()), status);
    }
  }

  const std::vector<ProcessPlan>& plans_;
  const std::filesystem::path& scratch_;
  const bool restarts_;
  int control_;
  int events_;
  std::vector<int> ignored_;  ///< Signals that workers ignore.
  int child_signals_ = -1;
  int starter_ = -1;         // a pidfd; -1 where the kernel has none
  std::vector<pid_t> pids_;  // -1: not started or reaped
};

struct Pipe {
  UniqueFd read;
  UniqueFd write;
};

Pipe make_pipe() {
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) throw SystemError("cannot make a pipe", errno);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

bool is_ignored(int signal) {
  struct sigaction action {};
  return sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

bool forks_can_go_on() {
  for (const char* name : {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}) {
    if (std::getenv(name)) return false;
  }
  struct stat threads {};
  // Less "." and "..".
  return ::stat("/proc/self/task", &threads) == 0 && threads.st_nlink - 2 == 1;
}

Supervisor::Supervisor(const std::vector<ProcessPlan>& processes,
                       const std::filesystem::path& scratch, bool restarts) {
  auto control = make_pipe();
  auto events = make_pipe();
  std::vector<int> ignored;
  for (const int signal : kStayIgnored) {
    if (is_ignored(signal)) ignored.push_back(signal);
  }
  // Signals are held until the child has put its own handling in place: ours must not run there.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const pid_t pid = fork();
  if (pid == 0) {
    control.write.reset();
    events.read.reset();
    SupervisorProcess(processes, scratch, restarts, control.read.get(), events.write.get(), ignored)
        .run();
  }
  const int failure = errno;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (pid < 0) throw SystemError("cannot start a process", failure);
  pid_ = pid;
  control_ = std::move(control.write);
  events_ = std::move(events.read);
  fcntl(events_.get(), F_SETFL, O_NONBLOCK);
}

Supervisor::~Supervisor() {
  finish();
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

std::optional<SupervisorEvent> Supervisor::next() {
  SupervisorEvent event{};
  ssize_t size = 0;
  do {
    size = ::read(events_.get(), &event, sizeof event);
  } while (size < 0 && errno == EINTR);
  if (size == sizeof event) return event;
  gone_ = size == 0 || (size < 0 && errno != EAGAIN);
  return std::nullopt;
}

void Supervisor::give(int32_t kind, int value) {
  if (!control_) return;
  const Order order{static_cast<Order::Kind>(kind), value};
  // SIGPIPE is ignored while a job runs; a supervisor that is gone is seen by `next`.
  [[maybe_unused]] const auto written = ::write(control_.get(), &order, sizeof order);
}

void Supervisor::signal_all(int signal) {
  give(Order::signal_all, signal);
}

void Supervisor::start_again(int index) {
  give(Order::start_again, index);
}

}  // namespace lockstep::launch
