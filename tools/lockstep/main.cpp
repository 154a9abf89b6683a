// The `lockstep` binary: what must start fast. The other subcommands are loaded from
// liblockstep_cli.so when asked for.

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "commands.h"
#include "lockstep/base/error.h"
#include "lockstep/base/settings.h"
#include "lockstep/base/unblocked_signals.h"
#include "lockstep/base/words.h"
#include "lockstep/launch/output.h"
#include "lockstep/tool/cli.h"
#include "lockstep/tool/cli_help.h"

namespace {

using namespace lockstep;
using namespace lockstep::tool;

constexpr const char* kAbout = "Distributed training for LibTorch.";
constexpr const char* kElsewhere = "'lockstep --help' lists the commands";
constexpr const char* kExamples[] = {
    "lockstep train --model mlp --dataset digits --devices 2",
    "lockstep run --nproc-per-node 4 ./my_program --its-own-flags"};
const Commands kCommands = {
    {"train", "train a model, on one process or several"},
    {"eval", "test saved weights"},
    {"run", "start a program as several ranks (torchrun's flags)"},
    {"bench", "measure steps, memory, scaling, all-reduce, loader and launch"},
    {"estimate-memory", "what each rank of a strategy keeps, before a run"},
    {"checkpoint", "look into checkpoints, Lockstep's and Python's, and convert them"},
    {"debug", "which rank was missing in which call, after a job has failed"},
    {"report", "a page of runs: curves, time by rank, failures, differences"},
    {"env", "versions, backends and devices; what is missing"},
    {"completion", "complete this command in bash, zsh or fish"},
};

std::string help_text() {
  const auto width = static_cast<size_t>(help_width());
  std::string text = std::string(kAbout) + "\n\nUsage: lockstep COMMAND [FLAGS]\n\nCommands:\n";
  for (auto [name, help] : kCommands) {
    name.resize(16, ' ');
    text += "  " + name + wrapped(help, {18, 18, width}) + "\n";
  }
  text += "\n" + wrapped(
                     "'lockstep help COMMAND' or 'lockstep COMMAND --help' lists a command's "
                     "flags; 'lockstep --version' prints the version.",
                     {0, 0, width});
  text += "\n\nExamples:\n";
  for (const char* example : kExamples) text += example_lines(example, "", width);
  return text;
}

std::vector<std::string> words_for_suggestion() {
  std::vector<std::string> words;
  for (const auto& command : kCommands) words.push_back(command.first);
  words.insert(words.end(), {"help", "--help", "--version"});
  return words;
}

/// `help train files` is `train --help files`.
std::vector<std::string> without_help(std::vector<std::string> words) {
  const bool asks = words.size() > 1 && words[0] == "help";
  if (!asks) return words;
  words.erase(words.begin());
  words.insert(words.begin() + 1, "--help");
  return words;
}

/// What a deleted folder makes of every relative path, and of the files that oneMKL looks for.
void check_working_folder() {
  std::error_code failure;
  const auto folder = std::filesystem::current_path(failure);
  if (!failure && !folder.empty()) return;
  throw SystemError("cannot tell the working folder", failure.value(),
                    "it was deleted, or may not be read: cd to another one");
}

int dispatch(const std::vector<std::string>& given) {
  const auto words = without_help(given);
  const std::string command = words.empty() ? "" : words[0];
  if (command.empty()) {
    std::fputs(help_text().c_str(), stderr);
    return kExitUsage;
  }
  if (command == "--version") {
    std::puts("lockstep " LOCKSTEP_VERSION);
    return kExitSuccess;
  }
  if (command == "--help" || command == "-h" || command == "help") {
    print(help_text());
    return kExitSuccess;
  }
  if (command.starts_with(kManPage)) {
    print(man_page("lockstep", kAbout, help_text(), command.substr(kManPage.size())));
    return kExitSuccess;
  }
  if (command == "completion") {
    Commands commands = kCommands;
    commands.emplace_back("help", "list a command's flags");
    return completion_command({words.begin() + 1, words.end()}, commands);
  }
  check_working_folder();
  // `env` is for looking at what is set, whatever it is.
  if (command != "env") check_settings();
  if (command == "run") {
    const std::vector<std::string> args(words.begin() + 1, words.end());
    // A reader that is gone is seen when writing; it must not keep the exit code from being ours.
    std::signal(SIGPIPE, SIG_IGN);
    return run_guarded("lockstep run", [&] { return run_command(args); });
  }
  for (const auto& known : kCommands) {
    if (command == known.first) return run_from_library(words);
  }
  const auto meant = did_you_mean(command, words_for_suggestion());
  throw UsageError(std::string("unknown ") + (command[0] == '-' ? "flag" : "command") + " '" +
                       command + "'" + (meant.empty() ? "" : "; " + meant),
                   kElsewhere);
}

}  // namespace

int main(int argc, char** argv) {
  launch::ensure_standard_descriptors();  // Before a socket takes the number of a closed one.
  const UnblockedSignals unblocked({SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2});
  // A write beyond `ulimit -f` is an error with a message, as in Python.
  std::signal(SIGXFSZ, SIG_IGN);
  const int code = run_guarded("lockstep", [&] {
    return dispatch({argv + std::min(argc, 1), argv + argc});
  });
  // Everything is over and released. LibTorch's own clean-up would only take time: 0.2 s.
  std::fflush(nullptr);
  _exit(code);
}
