#include "lockstep/base/log.h"

#include <unistd.h>

#include <atomic>

#include "lockstep/base/env.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

LogLevel level_from_environment() {
  // A word that is none of these is refused elsewhere: see log_level_setting.
  const std::string text = to_lower(env_string("LOCKSTEP_LOG_LEVEL").value_or(""));
  if (text == "debug") return LogLevel::debug;
  if (text == "warning") return LogLevel::warning;
  if (text == "error") return LogLevel::error;
  if (text == "quiet") return LogLevel::quiet;
  return LogLevel::info;
}

std::atomic<LogLevel>& current_level() {
  static std::atomic<LogLevel> level{level_from_environment()};
  return level;
}

const char* prefix_of(LogLevel level) {
  switch (level) {
    case LogLevel::debug:
      return "debug: ";
    case LogLevel::warning:
      return "warning: ";
    case LogLevel::error:
      return "error: ";
    default:
      return "";
  }
}

/// As launchers say it: torchrun's variable, Open MPI's, Slurm's.
std::optional<std::string> rank_text() {
  for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"}) {
    if (auto rank = env_string(name)) return rank;
  }
  return std::nullopt;
}

}  // namespace

LogLevel log_level() {
  return current_level();
}

void set_log_level(LogLevel level) {
  current_level() = level;
}

void log(LogLevel level, std::string_view text) {
  if (level < log_level()) return;
  const auto rank = rank_text();
  const bool first = !rank || *rank == "0";
  if (!first && level < LogLevel::warning) return;
  std::string line;
  if (!first) line += "[rank" + *rank + "] ";
  line += prefix_of(level);
  line += text;
  line += '\n';
  // A closed standard error must not end a training job; there is nowhere left to report it.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace lockstep
