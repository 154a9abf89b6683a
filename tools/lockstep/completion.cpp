#include "commands.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/tool/cli.h"

namespace lockstep::tool {
namespace {

/// The scripts ask by this word in the place of a shell's name, with the words of the command line.
constexpr const char* kWords = "words";
constexpr const char* kLetters =
    "abcdefghijklmnopqrstuvwxyz-";  ///< Of a benchmark's or an action's name.

constexpr const char* kBash = R"sh(_lockstep() {
  local cur=${COMP_WORDS[COMP_CWORD]}
  [ "$cur" != = ] || cur=
  COMPREPLY=($(compgen -W "$(lockstep completion words "${COMP_WORDS[@]:1:$COMP_CWORD}" 2>/dev/null | cut -f1)" -- "$cur"))
}
complete -o default -F _lockstep lockstep
)sh";
constexpr const char* kZsh = "autoload -U +X bashcompinit && bashcompinit\n";
constexpr const char* kFish = R"sh(function __lockstep
  set -l words (commandline -opc) (commandline -ct)
  set -l found (lockstep completion words $words[2..] 2>/dev/null)
  set -q found[1]; and printf '%s\n' $found; or __fish_complete_path $words[-1]
end
complete -c lockstep -f -a '(__lockstep)'
)sh";

/// Of HelpPage::table.
struct Row {
  std::vector<std::string> names;  ///< Empty: what stands without a flag.
  std::string value, help;         ///< Empty `value`: it takes none.

  std::vector<std::string> choices() const {
    return value.find('|') == std::string::npos ? std::vector<std::string>() : split(value, '|');
  }
};

/// Of a command, which says it itself: this process can load one of the libraries only.
std::vector<Row> rows_of(const std::string& command) {
  const auto self = std::filesystem::read_symlink("/proc/self/exe").string();
  const std::string line = "env -i '" + self + "' " + command + " " + kFlagTable + " 2>/dev/null";
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen(line.c_str(), "r"), ::pclose);
  std::string text;
  std::array<char, 4096> part{};
  while (pipe && std::fgets(part.data(), part.size(), pipe.get())) text += part.data();
  std::vector<Row> rows;
  for (const auto& row : split(text, '\n')) {
    const auto cells = split(row, '\t');
    if (cells.size() != 3) continue;
    rows.push_back({{}, cells[1], cells[2].substr(0, cells[2].find_first_of(".;"))});
    if (!cells[0].empty()) rows.back().names = split(cells[0], ',');
  }
  return rows;
}

/// What may stand in the place of the last of `words`, in a line each, with a help after a tab.
/// Empty: the name of a file.
std::string candidates(std::vector<std::string> words, const Commands& commands) {
  if (!words.empty() && words.back() == "=") words.back().clear();
  std::erase(words, "=");  // bash makes it a word of its own
  std::string text;
  if (!words.empty() && words[0] == "help") words.erase(words.begin());
  const bool is_known =
      words.size() > 1 && std::any_of(commands.begin(), commands.end(),
                                      [&](const auto& one) { return one.first == words[0]; });
  if (!is_known) {
    for (const auto& [name, help] : commands) text += name + "\t" + help + "\n";
    return words.size() < 2 ? text : "";
  }
  const bool has_kind = (words[0] == "bench" || words[0] == "checkpoint") && words.size() > 2 &&
                        words[1].find_first_not_of(kLetters) == std::string::npos;
  const std::string& before = words[words.size() - 2];
  for (const auto& row : rows_of(has_kind ? words[0] + " " + words[1] : words[0])) {
    const bool is_flag = std::find(row.names.begin(), row.names.end(), before) != row.names.end();
    if (is_flag && !row.value.empty()) return join(row.choices(), "\n");
    const bool takes_files = row.names.empty() && row.choices().empty();
    if (takes_files && !words.back().starts_with('-')) return "";
    for (const auto& name : row.names.empty() ? row.choices() : row.names)
      text += name + "\t" + row.help + "\n";
  }
  return text;
}

}  // namespace

int completion_command(const std::vector<std::string>& args, const Commands& commands) {
  if (!args.empty() && args[0] == kWords) {
    print(candidates({args.begin() + 1, args.end()}, commands));
    return kExitSuccess;
  }
  std::string shell;
  Cli cli("lockstep completion", "Prints what makes a shell complete this command at TAB.");
  cli.example("source <(lockstep completion bash)", "in ~/.bashrc; likewise zsh in ~/.zshrc");
  cli.example("lockstep completion fish > ~/.config/fish/completions/lockstep.fish");
  cli.positional("SHELL", shell, "bash, zsh or fish", /*required=*/true, {"bash", "zsh", "fish"});
  if (!cli.parse(args)) return kExitSuccess;
  print(shell == "fish" ? kFish : shell == "zsh" ? kZsh + std::string(kBash) : kBash);
  return kExitSuccess;
}

}  // namespace lockstep::tool
