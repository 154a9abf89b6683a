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

namespace lockstep::tool {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kExecFailed = 127;

/// What a wait for a child ends by.
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

/// By env(1): between fork and exec nothing may change an environment.
std::vector<std::string> with_variables(const std::map<std::string, std::string>& variables,
                                        const std::vector<std::string>& command) {
  std::vector<std::string> words = {"env"};
  for (const auto& [name, value] : variables)
    if (value.empty()) words.insert(words.end(), {"-u", name});
  for (const auto& [name, value] : variables)
    if (!value.empty()) words.push_back(name + "=" + value);
  words.insert(words.end(), command.begin(), command.end());
  return words;
}

UniqueFd opened(const std::filesystem::path& path, int flags) {
  UniqueFd fd(::open(path.c_str(), flags | O_CLOEXEC, 0600));
  if (!fd) throw SystemError("cannot open '" + path.string() + "'", errno);
  return fd;
}

pid_t start(std::vector<std::string> words, const std::filesystem::path& folder) {
  const UniqueFd in = opened("/dev/null", O_RDONLY);
  const UniqueFd out = opened(folder / "out", O_WRONLY | O_CREAT);
  const UniqueFd err = opened(folder / "err", O_WRONLY | O_CREAT);
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  sigset_t none;
  ::sigemptyset(&none);
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) throw SystemError("cannot start '" + join(words, " ") + "'", errno);
  if (child > 0) return child;
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(kExecFailed);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::dup2(in.get(), 0);
  ::dup2(out.get(), 1);
  ::dup2(err.get(), 2);
  ::execvp(argv[0], argv.data());
  ::_exit(kExecFailed);
}

/// A child and how it ended.
struct Child {
  pid_t pid;
  int raw_status = 0;
  rusage usage{};

  bool ended(int options) { return ::wait4(pid, &raw_status, options, &usage) == pid; }

  /// TERM, then KILL, so that nothing is left when an error passes.
  void stop() {
    constexpr auto kTermGrace = std::chrono::seconds(2);
    constexpr timespec kPollInterval = {0, 1'000'000};
    ::kill(pid, SIGTERM);
    const auto deadline = Clock::now() + kTermGrace;
    while (!ended(WNOHANG)) {
      ::nanosleep(&kPollInterval, nullptr);
      if (Clock::now() < deadline) continue;
      ::kill(pid, SIGKILL);
      ended(0);
      return;
    }
  }
};

}  // namespace

std::shared_ptr<void> hold_interrupts() {
  const sigset_t held = interrupts();
  sigset_t before;
  ::pthread_sigmask(SIG_BLOCK, &held, &before);
  // Ignored, as whoever started us may have left it, the kernel would take our children's results.
  ::signal(SIGCHLD, SIG_DFL);
  return {nullptr, [before](void*) { ::pthread_sigmask(SIG_SETMASK, &before, nullptr); }};
}

ProcessResult run_process(const std::vector<std::string>& command,
                          const std::map<std::string, std::string>& variables,
                          std::chrono::milliseconds timeout) {
  const auto signals_wait = hold_interrupts();
  const TemporaryDirectory folder("lockstep-bench");
  const auto begin = Clock::now();
  Child child{start(with_variables(variables, command), folder.path())};
  while (!child.ended(WNOHANG)) {
    const bool timed_out = Clock::now() > begin + timeout;
    const int signal_number = timed_out ? 0 : wait_for_end();
    if (!timed_out && signal_number == 0) continue;
    child.stop();
    if (signal_number != 0) throw InterruptedError(signal_number);
    throw TimeoutError("'" + join(command, " ") + "' did not end within " +
                       human_seconds(std::chrono::duration<double>(timeout).count()));
  }
  ProcessResult result;
  result.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  const int raw = child.raw_status;
  result.status = WIFSIGNALED(raw) ? 128 + WTERMSIG(raw) : WEXITSTATUS(raw);
  result.peak_bytes = static_cast<int64_t>(child.usage.ru_maxrss) * 1024;
  result.out = read_file(folder.path() / "out");
  result.err = read_file(folder.path() / "err");
  return result;
}

void expect_success(const std::string& what, const ProcessResult& result) {
  if (result.status == 0) return;
  auto lines = split(result.err, '\n');
  while (!lines.empty() && lines.back().empty()) lines.pop_back();
  constexpr size_t kShown = 12;
  const size_t first = lines.size() > kShown ? lines.size() - kShown : 0;
  const std::vector<std::string> last(lines.begin() + first, lines.end());
  throw Error(what + " failed with exit code " + std::to_string(result.status) +
              (last.empty() ? std::string() : "; its last lines:\n    " + join(last, "\n    ")));
}

}  // namespace lockstep::tool
