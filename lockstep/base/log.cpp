#include "lockstep/base/log.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "lockstep/base/env.h"
#include "lockstep/base/terminal.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr std::string_view kLevels[] = {"debug", "info", "warning", "error", "quiet"};

LogLevel level_from_environment() {
  const std::string text = to_lower(env_string("LOCKSTEP_LOG_LEVEL").value_or(""));
  const auto found = std::ranges::find(kLevels, text);
  // A word that is none of these is refused elsewhere: see log_level_setting.
  return found == std::end(kLevels) ? LogLevel::info
                                    : static_cast<LogLevel>(found - std::begin(kLevels));
}

std::atomic<LogLevel>& current_level() {
  static std::atomic<LogLevel> level{level_from_environment()};
  return level;
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
  std::string line(line_start(STDERR_FILENO));
  if (!first) line += "[rank" + *rank + "] ";
  const bool is_named = level != LogLevel::info && level != LogLevel::quiet;
  if (is_named) line.append(kLevels[static_cast<size_t>(level)]).append(": ");
  line.append(text).append("\n");
  // A closed standard error must not end a training job; there is nowhere left to report it.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace lockstep
