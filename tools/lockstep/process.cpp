#include "tools/lockstep/process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"

extern char** environ;

namespace lockstep::tool {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kTermGrace = std::chrono::seconds(2);
constexpr timespec kPollInterval = {0, 1'000'000};
constexpr int kExecFailed = 127;

struct Child {
  pid_t pid = -1;
  Clock::time_point started;
  bool running = false;
  std::filesystem::path out;
  std::filesystem::path err;
};

/// What a wait for children ends by.
sigset_t interrupts() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) ::sigaddset(&set, number);
  return set;
}

/// Waits until a child ends or an interrupt comes, which it gives, else 0. Looks are rare: they
/// would take processor time from what is measured. They are for a signal that another thread has
/// taken.
int wait_for_end() {
  constexpr timespec kLook = {0, 100'000'000};
  const sigset_t set = interrupts();
  const int seen = ::sigtimedwait(&set, nullptr, &kLook);
  return seen == SIGCHLD ? 0 : std::max(seen, 0);
}

std::vector<std::string> child_environment(const std::map<std::string, std::string>& changes) {
  std::vector<std::string> variables;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry;
    if (!changes.count(text.substr(0, text.find('=')))) variables.push_back(text);
  }
  for (const auto& [name, value] : changes) {
    if (!value.empty()) variables.push_back(name + "=" + value);
  }
  return variables;
}

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> result;
  for (auto& word : words) result.push_back(word.data());
  result.push_back(nullptr);
  return result;
}

int open_output(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) throw SystemError("cannot write '" + path.string() + "'", errno);
  return fd;
}

// Between fork and exec only async-signal-safe calls are made: all memory is ready before.
Child start(const ProcessSpec& spec, const std::filesystem::path& folder, size_t index) {
  Child child;
  child.out = folder / ("out" + std::to_string(index));
  child.err = folder / ("err" + std::to_string(index));
  const UniqueFd out(open_output(child.out));
  const UniqueFd err(open_output(child.err));
  const UniqueFd in(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  auto words = spec.argv;
  auto variables = child_environment(spec.env);
  const auto argv = pointers(words);
  const auto envp = pointers(variables);
  const pid_t parent = ::getpid();
  sigset_t none;
  ::sigemptyset(&none);

  child.started = Clock::now();
  child.pid = ::fork();
  if (child.pid < 0) throw SystemError("cannot start '" + spec.argv.front() + "'", errno);
  if (child.pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(kExecFailed);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    ::dup2(in.get(), 0);
    ::dup2(out.get(), 1);
    ::dup2(err.get(), 2);
    ::execvpe(argv[0], argv.data(), envp.data());
    ::_exit(kExecFailed);
  }
  child.running = true;
  return child;
}

int status_of(int raw) {
  return WIFSIGNALED(raw) ? 128 + WTERMSIG(raw) : WEXITSTATUS(raw);
}

void signal_running(std::vector<Child>& children, int signal_number) {
  for (const auto& child : children) {
    if (child.running) ::kill(child.pid, signal_number);
  }
}

/// Takes the child's result if it has ended.
bool reap(Child& child, ProcessResult& result, int options) {
  int raw = 0;
  rusage usage{};
  const pid_t pid = ::wait4(child.pid, &raw, options, &usage);
  if (pid != child.pid) return false;
  child.running = false;
  result.seconds = std::chrono::duration<double>(Clock::now() - child.started).count();
  result.status = status_of(raw);
  result.peak_bytes = static_cast<int64_t>(usage.ru_maxrss) * 1024;
  return true;
}

/// Sends TERM, then KILL, and reaps all, so that nothing is left when an error passes.
class StopAll {
 public:
  StopAll(std::vector<Child>& children, std::vector<ProcessResult>& results)
      : children_(children), results_(results) {}
  ~StopAll() {
    signal_running(children_, SIGTERM);
    const auto deadline = Clock::now() + kTermGrace;
    while (poll() && Clock::now() < deadline) ::nanosleep(&kPollInterval, nullptr);
    signal_running(children_, SIGKILL);
    for (size_t i = 0; i < children_.size(); ++i) {
      if (children_[i].running) reap(children_[i], results_[i], 0);
    }
  }
  /// True while one is running.
  bool poll() {
    bool running = false;
    for (size_t i = 0; i < children_.size(); ++i) {
      if (children_[i].running && !reap(children_[i], results_[i], WNOHANG)) running = true;
    }
    return running;
  }

 private:
  std::vector<Child>& children_;
  std::vector<ProcessResult>& results_;
};

bool one_failed(const std::vector<Child>& children, const std::vector<ProcessResult>& results) {
  for (size_t i = 0; i < children.size(); ++i) {
    if (!children[i].running && results[i].status != 0) return true;
  }
  return false;
}

}  // namespace

OrderlyInterrupts::OrderlyInterrupts() {
  const sigset_t set = interrupts();
  ::pthread_sigmask(SIG_BLOCK, &set, &before_);
  // Ignored, as whoever started us may have left it, the kernel would take our children's results.
  ::signal(SIGCHLD, SIG_DFL);
}

OrderlyInterrupts::~OrderlyInterrupts() {
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

std::vector<ProcessResult> run_processes(const std::vector<ProcessSpec>& specs,
                                         std::chrono::milliseconds timeout) {
  const OrderlyInterrupts signals_wait;
  const TemporaryDirectory folder("lockstep-bench");
  std::vector<ProcessResult> results(specs.size());
  std::vector<Child> children;
  bool timed_out = false;
  {
    StopAll stop(children, results);
    for (size_t i = 0; i < specs.size(); ++i) {
      children.push_back(start(specs[i], folder.path(), i));
    }
    const auto deadline = Clock::now() + timeout;
    while (stop.poll() && !one_failed(children, results)) {
      timed_out = Clock::now() > deadline;
      if (timed_out) break;
      if (const int signal_number = wait_for_end()) throw InterruptedError(signal_number);
    }
  }
  for (size_t i = 0; i < specs.size(); ++i) {
    results[i].out = read_file(children[i].out);
    results[i].err = read_file(children[i].err);
  }
  if (timed_out) {
    throw TimeoutError("'" + join(specs.front().argv, " ") + "' did not end within " +
                       human_seconds(std::chrono::duration<double>(timeout).count()));
  }
  return results;
}

ProcessResult run_process(const ProcessSpec& spec, std::chrono::milliseconds timeout) {
  return run_processes({spec}, timeout).front();
}

const ProcessResult& expect_success(const std::string& what, const ProcessResult& result) {
  if (result.status == 0) return result;
  auto lines = split(result.err, '\n');
  while (!lines.empty() && lines.back().empty()) lines.pop_back();
  constexpr size_t kShown = 12;
  const size_t first = lines.size() > kShown ? lines.size() - kShown : 0;
  const std::vector<std::string> last(lines.begin() + first, lines.end());
  throw Error(what + " failed with exit code " + std::to_string(result.status) +
              (last.empty() ? std::string() : "; its last lines:\n    " + join(last, "\n    ")));
}

}  // namespace lockstep::tool
