// What the example programs share. They read flags as the Python originals write them. When
// something goes wrong, they end with a message and an exit code.
#pragma once

#include <cerrno>
#include <cstdlib>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/tool/cli.h"

namespace examples {

/// The flags of a program: `option(NAMES, VARIABLE, HELP, {MIN, MAX})`. The variable's present
/// value is the default. See lockstep/tool/cli.h.
class Flags : public lockstep::tool::Cli {
 public:
  explicit Flags(const std::string& about) : Cli(program_invocation_short_name, about) {}
};

/// argparse takes short flags of two letters (`-nr 0`, `-ip 10.0.0.1`), where most other programs
/// read `-nr` as the flags n and r. So these are given their long names, which are the same with
/// one more dash.
inline std::vector<std::string> with_long_flags(int argc, char** argv,
                                                const std::vector<std::string>& two_letter_flags) {
  std::vector<std::string> words(argv + 1, argv + argc);
  for (auto& word : words) {
    for (const auto& flag : two_letter_flags) {
      const bool joined = word.rfind(flag + "=", 0) == 0;
      if (word == flag || joined) word.insert(0, "-");
    }
  }
  return words;
}

/// Reads the command line into the variables that `flags` knows. --help prints them and ends the
/// program. A mistake is a UsageError.
inline void parse(Flags& flags, int argc, char** argv,
                  const std::vector<std::string>& two_letter_flags = {}) {
  if (!flags.parse(with_long_flags(argc, argv, two_letter_flags))) {
    std::exit(lockstep::kExitSuccess);
  }
}

/// Which of the machines this is must be below their number.
inline void check_node_rank(const std::string& flag, int node_rank, int nodes) {
  if (node_rank < nodes) return;
  throw lockstep::UsageError(
      flag + " " + std::to_string(node_rank) + " is not below -n " + std::to_string(nodes),
      "the machines are numbered from 0: the last one of them is " + std::to_string(nodes - 1));
}

/// For the end of `main`: prints the exception that was caught there and gives the exit code for
/// it.
inline int report_error() {
  return lockstep::tool::run_guarded(program_invocation_short_name, []() -> int { throw; });
}

}  // namespace examples
