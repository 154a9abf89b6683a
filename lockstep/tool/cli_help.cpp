#include "lockstep/tool/cli_help.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include "lockstep/base/text.h"
#include "lockstep/tool/cli.h"

namespace lockstep::tool {
namespace {

/// `text` broken at blanks into lines of at most `width`, each after the first indented.
std::string wrapped(const std::string& text, size_t indent, size_t width) {
  std::string out;
  size_t column = indent;
  for (const auto& word : split(text, ' ')) {
    if (word.empty()) continue;
    if (column > indent && column + 1 + word.size() > width) {
      out += '\n';
      out.append(indent, ' ');
      column = indent;
    } else if (column > indent) {
      out += ' ';
      ++column;
    }
    out += word;
    column += word.size();
  }
  return out;
}

/// "  --flag VALUE      what it does", the second column wrapped.
std::string help_row(const std::string& left, const std::string& right, size_t width) {
  constexpr size_t kColumn = 30;
  std::string row = "  " + left;
  if (row.size() + 2 > kColumn) {
    row += '\n';
    row.append(kColumn, ' ');
  } else {
    row.resize(kColumn, ' ');
  }
  return row + wrapped(right, kColumn, width) + "\n";
}

}  // namespace

std::string HelpPage::text(int width) const {
  const auto columns = static_cast<size_t>(width);
  std::string text = wrapped(summary, 0, columns) + "\n\nUsage: " + command + " [FLAGS]";
  for (const auto& info : positionals) {
    text += info.required ? " " + info.name : " [" + info.name + "]";
  }
  if (!trailing_name.empty()) text += " " + trailing_name;
  text += "\n";
  if (!positionals.empty() || !trailing_name.empty()) text += "\nArguments:\n";
  for (const auto& info : positionals) text += help_row(info.name, info.help, columns);
  if (!trailing_name.empty()) text += help_row(trailing_name, trailing_help, columns);
  std::vector<std::string> groups;
  for (const auto& info : options) {
    if (std::find(groups.begin(), groups.end(), info.group) == groups.end()) {
      groups.push_back(info.group);
    }
  }
  for (const auto& group : groups) {
    text += "\n" + group + ":\n";
    for (const auto& info : options) {
      if (info.group != group) continue;
      std::string left = join(info.names, ", ");
      if (!info.placeholder.empty()) left += " " + info.placeholder;
      const bool has_default = !info.shown_default.empty();
      text +=
          help_row(left, info.help + (has_default ? " [" + info.shown_default + "]" : ""), columns);
    }
  }
  if (!examples.empty()) text += "\nExamples:\n";
  for (const auto& [line, what] : examples) {
    if (!what.empty()) text += "  # " + what + "\n";
    text += "  " + line + "\n";
  }
  return text;
}

int help_width() {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return std::clamp<int>(size.ws_col, 80, 100);
}

}  // namespace lockstep::tool
