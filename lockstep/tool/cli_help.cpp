#include "lockstep/tool/cli_help.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/tool/cli.h"

namespace lockstep::tool {
namespace {

/// Where a help page has two columns, and the narrowest page that has.
constexpr size_t kColumn = 30;
constexpr size_t kTwoColumns = 70;
constexpr size_t kIndent = 6;  ///< Of what goes on below a line.

/// The pieces of a word between which a line may end: `--model a|b|c` and paths have no blanks.
std::vector<std::string> pieces_of(const std::string& word) {
  std::vector<std::string> pieces(1);
  for (const char c : word) {
    pieces.back() += c;
    if (c == '|' || c == ',' || c == '/') pieces.emplace_back();
  }
  if (pieces.back().empty()) pieces.pop_back();
  return pieces;
}

/// "  --flag VALUE      what it does", the second column wrapped; on a narrow page below the first.
std::string help_row(const std::string& left, const std::string& right, size_t width,
                     size_t wide_column = kColumn) {
  const size_t column = width < kTwoColumns ? kIndent : wide_column;
  std::string row = "  " + wrapped(left, {2, kIndent, width});
  if (row.size() + 2 > column) {
    row += '\n';
    row.append(column, ' ');
  } else {
    row.resize(column, ' ');
  }
  for (const auto& line : split(right, '\n'))
    row += (row.ends_with(' ') ? "" : std::string(column, ' ')) +
           wrapped(line, {column, column, width}) + "\n";
  return row;
}

/// A text in roff: nothing in it is a request or an escape.
std::string roff_text(const std::string& text) {
  const std::string plain = "\\-`'^~";
  const char* const escapes[] = {"\\e", "\\-", "\\(ga", "\\(aq", "\\(ha", "\\(ti"};
  std::string out;
  for (const char c : text) {
    if (c == '.' && (out.empty() || out.back() == '\n')) out += "\\&";
    const size_t special = plain.find(c);
    out += special == std::string::npos ? std::string(1, c) : escapes[special];
  }
  return out;
}

}  // namespace

std::string wrapped(const std::string& text, const Wrapping& how) {
  const std::string begin = how.prefix.empty() ? std::string(how.indent, ' ') : how.prefix;
  std::string out;
  size_t column = how.first_column;
  bool fresh = true;  // nothing stands in this line yet
  const auto put = [&](const std::string& piece, bool after_blank) {
    const size_t blank = after_blank && !fresh ? 1 : 0;
    if (!fresh && column + blank + piece.size() > how.width) {
      out += how.line_end + "\n" + begin;
      column = begin.size();
    } else if (blank == 1) {
      out += ' ';
      ++column;
    }
    out += piece;
    column += piece.size();
    fresh = false;
  };
  for (const auto& word : split(text, ' ')) {
    if (word.empty()) continue;
    const bool fits_a_line = begin.size() + word.size() <= how.width;
    if (fits_a_line || !how.line_end.empty()) {
      put(word, true);
      continue;
    }
    bool first = true;
    for (const auto& piece : pieces_of(word)) {
      put(piece, first);
      first = false;
    }
  }
  return out;
}

std::string example_lines(const std::string& line, const std::string& what, size_t width) {
  std::string text;
  if (!what.empty()) text += "  # " + wrapped(what, {4, 4, width, "  # "}) + "\n";
  return text + "  " + wrapped(line, {2, kIndent, width - 2, {}, " \\"}) + "\n";
}

std::vector<std::string> HelpPage::headings() const {
  std::vector<std::string> all;
  for (const auto& info : options) {
    if (std::find(all.begin(), all.end(), info.group) == all.end()) all.push_back(info.group);
  }
  return all;
}

std::vector<std::string> HelpPage::sections() const {
  std::vector<std::string> all;
  for (const auto& heading : headings()) all.push_back(split(to_lower(heading), ' ').back());
  return all;
}

std::string HelpPage::flags_of(const std::string& heading, size_t columns) const {
  std::string text = heading + ":\n";
  for (const auto& info : options) {
    if (info.group != heading) continue;
    std::string left = join(info.names, ", ");
    if (!info.placeholder.empty()) left += " " + info.placeholder;
    const bool has_default = !info.shown_default.empty();
    text +=
        help_row(left, info.help + (has_default ? " [" + info.shown_default + "]" : ""), columns);
  }
  return text;
}

bool HelpPage::has_common() const {
  return std::any_of(options.begin(), options.end(),
                     [](const OptionInfo& info) { return !info.line.empty(); });
}

std::string HelpPage::lists_the_flags() const {
  return "'" + command + (has_common() ? " --help-all" : " --help") + "' lists the flags";
}

std::string HelpPage::usage() const {
  std::string text = command + " [FLAGS]";
  for (const auto& info : positionals) {
    text += info.required ? " " + info.name : " [" + info.name + "]";
  }
  return trailing_name.empty() ? text : text + " " + trailing_name;
}

std::string HelpPage::short_text(int width) const {
  constexpr size_t kLongest = 13;  // A longer list of choices is left to the line.
  constexpr size_t kColumnOfLines = 26;
  const auto columns = static_cast<size_t>(width);
  std::string text = wrapped("Usage: " + usage() + ". " + summary, {0, kIndent, columns}) + "\n";
  for (const auto& group : headings()) {
    std::string rows;
    for (const auto& info : options) {
      if (info.group != group || info.line.empty()) continue;
      std::string left = info.main_name();
      if (!info.placeholder.empty())
        left += info.placeholder.size() > kLongest ? " NAME" : " " + info.placeholder;
      const bool has_default = !info.shown_default.empty();
      rows += help_row(left, info.line + (has_default ? " [" + info.shown_default + "]" : ""),
                       columns, kColumnOfLines);
    }
    if (!rows.empty()) text += group + ":\n" + rows;
  }
  if (!examples.empty()) {
    const std::string line = "Example: " + examples.front().first;
    text += wrapped(line, {0, kIndent, columns - 2, {}, " \\"}) + "\n";
  }
  const std::string more =
      "'" + command + " --help SECTION' lists all flags of a section: " + join(sections(), ", ") +
      ". '" + command + " --help-all' lists all " + std::to_string(options.size()) + ".";
  return text + wrapped(more, {0, 0, columns}) + "\n";
}

std::string HelpPage::text(int width, const std::string& section) const {
  constexpr size_t kWorthSections = 4;
  const auto columns = static_cast<size_t>(width);
  const auto groups = headings();
  for (const auto& group : groups) {
    if (!section.empty() && (" " + to_lower(group)).find(" " + to_lower(section)) != group.npos) {
      return flags_of(group, columns);
    }
  }
  if (!section.empty() && positionals.empty() && trailing_name.empty())
    expect_one_of("--help", section, sections());
  std::string text = wrapped(summary, {0, 0, columns}) +
                     "\n\nUsage: " + wrapped(usage(), {7, kIndent, columns}) + "\n";
  if (!positionals.empty() || !trailing_name.empty()) text += "\nArguments:\n";
  for (const auto& info : positionals) text += help_row(info.name, info.help, columns);
  if (!trailing_name.empty()) text += help_row(trailing_name, trailing_help, columns);
  for (const auto& group : groups) text += "\n" + flags_of(group, columns);
  if (!examples.empty()) text += "\nExamples:\n";
  for (const auto& [line, what] : examples) text += example_lines(line, what, columns);
  if (groups.size() < kWorthSections) return text;
  const std::string one = "'" + command + " --help " +
                          split(to_lower(groups.front()), ' ').front() +
                          "' prints one section: " + join(groups, ", ");
  return text + "\n" + wrapped(one, {0, 0, columns}) + "\n";
}

std::string HelpPage::table() const {
  std::string text;
  for (const auto& info : options)
    text += join(info.names, ",") + "\t" + info.placeholder + "\t" + info.help + "\n";
  for (const auto& info : positionals) text += "\t" + info.choices + "\t" + info.help + "\n";
  return trailing_name.empty() ? text : text + "\t\t" + trailing_help + "\n";
}

std::string man_page(const std::string& command, const std::string& summary,
                     const std::string& help, const std::string& release) {
  std::string name = command, title = command;
  std::replace(name.begin(), name.end(), ' ', '-');
  for (char& c : title) c = c == ' ' ? '-' : static_cast<char>(std::toupper(c));
  std::string first = summary.substr(0, summary.find(". "));
  first.erase(first.find_last_not_of('.') + 1);
  const auto parts = split(release + ",", ',');
  return ".TH " + title + " 1 " + parts[1] + " \"lockstep " + parts[0] + "\" Lockstep\n.SH NAME\n" +
         roff_text(name) + " \\- " + roff_text(first) + "\n.SH DESCRIPTION\n.nf\n" +
         roff_text(help) + ".fi\n";
}

int help_width() {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return std::clamp<int>(size.ws_col, 40, 100);
}

}  // namespace lockstep::tool
