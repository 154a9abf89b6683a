#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace lockstep::tool {

struct ProcessResult {
  int status = 0;          ///< The exit code, or 128 + the number of the signal that ended it.
  std::string out;         ///< Standard output, whole.
  std::string err;         ///< Standard error, whole.
  double seconds = 0;      ///< From the start to the end of the process.
  int64_t peak_bytes = 0;  ///< Largest resident size of it or of any process it waited for.
};

/// While the result lives, INT, TERM and HUP do not end this process at once. `run_process` ends
/// its child and throws InterruptedError, so that temporary files go too. For the main thread,
/// before other threads are started. These inherit it.
std::shared_ptr<void> hold_interrupts();

/// Runs a command, whose program is looked up in PATH, with these variables in the environment; an
/// empty value removes one. When the time is up it gets TERM and, two seconds later, KILL, and
/// TimeoutError names the command. It gets TERM too when this process dies. A command that fails is
/// returned, not thrown. Throws SystemError when none can be started, and InterruptedError (see
/// hold_interrupts).
ProcessResult run_process(const std::vector<std::string>& command,
                          const std::map<std::string, std::string>& variables = {},
                          std::chrono::milliseconds timeout = std::chrono::minutes(10));

/// Throws Error with the program's name, its status and its last lines of standard error unless it
/// ended with 0.
void expect_success(const std::string& what, const ProcessResult& result);

}  // namespace lockstep::tool
