// The `lockstep` binary: what must start fast. The other subcommands are loaded from
// liblockstep_cli.so when asked for.

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <string>
#include <vector>

#include "cli.h"
#include "library.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "run.h"

namespace {

using namespace lockstep;
using namespace lockstep::tool;

struct Row {
  const char* name;
  const char* help;
};

constexpr Row kCommands[] = {
    {"train", "train a model, on one process or several"},
    {"eval", "test saved weights"},
    {"run", "start a program as several ranks (torchrun's flags)"},
    {"bench", "measure steps, all-reduce, loader and launch"},
    {"env", "versions, backends and devices; what is missing"},
};

std::string help_text() {
  std::string text =
      "Distributed training for LibTorch.\n\nUsage: lockstep COMMAND [FLAGS]\n\nCommands:\n";
  for (const auto& row : kCommands) {
    std::string name = row.name;
    name.resize(8, ' ');
    text += "  " + name + row.help + "\n";
  }
  return text +
         "\n'lockstep COMMAND --help' lists a command's flags; 'lockstep --version' the version.\n"
         "\nExamples:\n"
         "  lockstep train --model mlp --dataset digits --devices 2\n"
         "  lockstep run --nproc-per-node 4 ./my_program --its-own-flags\n";
}

std::vector<std::string> words_for_suggestion() {
  std::vector<std::string> words;
  for (const auto& row : kCommands) words.push_back(row.name);
  words.insert(words.end(), {"--help", "--version"});
  return words;
}

int dispatch(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  if (command.empty()) {
    std::fputs(help_text().c_str(), stderr);
    return kExitUsage;
  }
  if (command == "--version") {
    std::puts("lockstep " LOCKSTEP_VERSION);
    return kExitSuccess;
  }
  if (command == "--help" || command == "-h" || (command == "help" && argc == 2)) {
    std::fputs(help_text().c_str(), stdout);
    return kExitSuccess;
  }
  const std::vector<std::string> args(argv + 2, argv + argc);
  if (command == "run") {
    // A reader that is gone is seen when writing; it must not keep the exit code from being ours.
    std::signal(SIGPIPE, SIG_IGN);
    const int code = run_guarded("lockstep run", [&] { return run_command(args); });
    // Everything is over and released; LibTorch's own clean-up would only take time.
    std::fflush(nullptr);
    _exit(code);
  }
  for (const auto& row : kCommands) {
    if (command == row.name) return run_from_library(argc, argv);
  }
  throw UsageError(
      unknown_word(command[0] == '-' ? "flag" : "command", command, words_for_suggestion()),
      "'lockstep --help' lists the commands");
}

}  // namespace

int main(int argc, char** argv) {
  return run_guarded("lockstep", [&] { return dispatch(argc, argv); });
}
