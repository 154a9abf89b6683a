#pragma once

#include <signal.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace lockstep::tool {

/// A program to run: an argv (argv[0] is looked up in PATH) and variables added to the environment.
/// An empty value removes the variable.
struct ProcessSpec {
  std::vector<std::string> argv;
  std::map<std::string, std::string> env = {};
};

struct ProcessResult {
  int status = 0;          ///< The exit code, or 128 + the number of the signal that ended it.
  std::string out;         ///< Standard output, whole.
  std::string err;         ///< Standard error, whole.
  double seconds = 0;      ///< From the start to the end of the process.
  int64_t peak_bytes = 0;  ///< Largest resident size of it or of any process it waited for.
};

/// While it lives, INT, TERM and HUP do not end this process at once. `run_processes` ends its
/// children and throws InterruptedError, so that temporary files go too. For the main thread,
/// before other threads are started. These inherit it.
class OrderlyInterrupts {
 public:
  OrderlyInterrupts();
  ~OrderlyInterrupts();
  OrderlyInterrupts(const OrderlyInterrupts&) = delete;
  OrderlyInterrupts& operator=(const OrderlyInterrupts&) = delete;

 private:
  sigset_t before_;
};

/// Runs programs side by side to their ends and returns their results in the same order. When one
/// fails or the time is up, the others get TERM and, two seconds later, KILL. A time-out throws
/// TimeoutError naming the command. They get TERM too when this process dies. Results of programs
/// that failed are returned, not thrown. Throws SystemError when one cannot be started, and
/// InterruptedError (see OrderlyInterrupts).
std::vector<ProcessResult> run_processes(const std::vector<ProcessSpec>& specs,
                                         std::chrono::milliseconds timeout);

/// The same for one program.
ProcessResult run_process(const ProcessSpec& spec, std::chrono::milliseconds timeout);

/// Throws Error with the program's name, its status and its last lines of standard error unless it
/// ended with 0.
const ProcessResult& expect_success(const std::string& what, const ProcessResult& result);

}  // namespace lockstep::tool
