// What the example programs share: reading flags as the Python originals write them, and ending
// with a message and an exit code when something goes wrong.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "lockstep/base/error.h"

namespace examples {

/// argparse takes short flags of two letters (`-nr 0`, `-ip 10.0.0.1`); CLI11 reads `-nr` as the
/// flags n and r. So these are given their long names, which are the same with one more dash,
/// before CLI11 sees them.
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

/// Reads the command line into what `app` knows. --help prints it and ends with 0; a mistake ends
/// with a message and 2.
inline void parse(CLI::App& app, int argc, char** argv,
                  const std::vector<std::string>& two_letter_flags = {}) {
  auto words = with_long_flags(argc, argv, two_letter_flags);
  for (auto* option : app.get_options()) {
    // As argparse: of a flag that is given twice the last one counts.
    if (!option->get_positional() && option->get_expected_max() == 1) option->take_last();
  }
  std::vector<std::string> reversed(words.rbegin(), words.rend());  // as CLI11 wants them
  try {
    app.parse(reversed);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error) == 0 ? lockstep::kExitSuccess : lockstep::kExitUsage);
  }
}

/// Prints what reached the end of `main` and gives the exit code for it.
inline int report(const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return lockstep::exit_code_of(error);
}

}  // namespace examples
