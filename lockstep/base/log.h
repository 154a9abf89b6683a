#pragma once

#include <string>
#include <string_view>

namespace lockstep {

/// Lines on standard error. Each is one write of "[rank3] warning: text\n", so the lines of several
/// processes and threads do not mix. Ranks other than 0 write only warnings and errors. The rank is
/// what the launcher's variable says (RANK, Open MPI's or Slurm's).
/// LOCKSTEP_LOG_LEVEL=debug|info|warning|error|quiet (default info) says what is written.
/// A line of level quiet is written always, as text alone.
enum class LogLevel { debug, info, warning, error, quiet };

void log(LogLevel level, std::string_view text);
inline void log_debug(std::string_view text) {
  log(LogLevel::debug, text);
}
inline void log_info(std::string_view text) {
  log(LogLevel::info, text);
}
inline void log_warning(std::string_view text) {
  log(LogLevel::warning, text);
}
inline void log_error(std::string_view text) {
  log(LogLevel::error, text);
}

/// The lowest level that is written, from the environment at the first call. --quiet can set it.
LogLevel log_level();
void set_log_level(LogLevel level);

}  // namespace lockstep
