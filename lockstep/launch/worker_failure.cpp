#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/launch/launcher.h"

namespace lockstep::launch {
namespace {

constexpr int kCannotExecute = 126;  // as a shell says it
constexpr int kNotFound = 127;

std::string signal_text(int number) {
  const char* name = sigabbrev_np(number);
  return (name ? "SIG" + std::string(name) + " (signal " : "signal (") + std::to_string(number) +
         ")";
}

std::string indented(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += "\n    " + line;
  return text;
}

}  // namespace

std::string memory_words(const MemoryUse& before, const MemoryUse& now) {
  if (now.kills <= before.kills) return {};
  if (!now.limit) return " by the kernel, as memory was used up";
  const std::string peak =
      now.peak ? " (peak " + human_bytes(static_cast<uint64_t>(*now.peak)) + ")" : "";
  return " at the memory limit of its cgroup, " + human_bytes(static_cast<uint64_t>(*now.limit)) +
         peak;
}

int WorkerFailure::exit_code() const {
  if (start_errno != 0) return start_errno == ENOENT ? kNotFound : kCannotExecute;
  if (WIFSIGNALED(wait_status)) return 128 + WTERMSIG(wait_status);
  return WEXITSTATUS(wait_status);
}

bool WorkerFailure::report_is_all() const {
  return start_errno == 0 && report_suffices && report && WIFEXITED(wait_status);
}

std::string WorkerFailure::ending() const {
  std::string text = "rank " + std::to_string(rank);
  if (start_errno != 0) {
    return text + " could not be started: " + file + ": " + std::strerror(start_errno);
  }
  if (local_rank != rank) text += " (local rank " + std::to_string(local_rank) + ")";
  text += " (pid " + std::to_string(pid) + ")";
  return text + (WIFSIGNALED(wait_status)
                     ? " was killed by " + signal_text(WTERMSIG(wait_status)) + memory
                     : " exited with code " + std::to_string(WEXITSTATUS(wait_status)));
}

std::string WorkerFailure::line() const {
  if (start_errno != 0 || !WIFEXITED(wait_status)) return ending();
  if (report) return told_by(rank, split(report->message, '\n').front());
  return ending() + (last_lines.empty() ? "" : ": " + last_lines.back());
}

std::string WorkerFailure::text() const {
  if (report_is_all()) return told_by(rank, report->message);
  std::string text = ending();
  if (start_errno != 0) return text;
  // A warning about the same does not say that it has become the end.
  const bool said = report && std::any_of(last_lines.begin(), last_lines.end(), [&](auto& line) {
                      return line.ends_with(split(report->message, '\n').front());
                    });
  if (report && !said) {
    text += "\n  it reported:" + indented(split(report->message, '\n'));
  }
  if (!last_lines.empty() && !lines_are_shown)
    text += "\n  its last lines of standard error:" + indented(last_lines);
  if (!error_log.empty()) text += "\n  its whole standard error: " + error_log.string();
  return text;
}

}  // namespace lockstep::launch
