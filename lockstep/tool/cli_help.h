#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::tool {

/// An option as --help shows it.
struct OptionInfo {
  std::vector<std::string> names;  // with their dashes, as shown
  std::string placeholder;         // empty: takes no value
  std::string help;
  std::string shown_default;
  std::string group;
  std::string line = {};  // of the short page; empty: it is not there
  std::function<void(const std::string& value)> set = {};
  bool given = false;

  std::string main_name() const { return names.back(); }
  bool has(const std::string& name) const {
    return std::find(names.begin(), names.end(), name) != names.end();
  }
};

/// A word without dashes.
struct PositionalInfo {
  std::string name;
  std::string help;
  std::function<void(const std::string&)> set;
  bool required;
  std::string choices = {};  // "a|b"; empty: any word
  bool several = false;
};

/// What --help says about a command.
struct HelpPage {
  std::string command;
  std::string summary;
  std::vector<OptionInfo> options;
  std::vector<PositionalInfo> positionals;
  std::string trailing_name;  // empty: none
  std::string trailing_help;
  std::vector<std::pair<std::string, std::string>> examples;  // command line, what it shows

  /// The page, wrapped to `width` columns; only the flags of the heading of which a word begins
  /// with `section`, in any case, where there is one. Throws UsageError where there is none, unless
  /// `section` may be an argument of the command.
  std::string text(int width, const std::string& section = {}) const;
  /// The common flags in a line each, below their headings.
  std::string short_text(int width) const;
  bool has_common() const;
  /// The hint of an error, with the command that lists them.
  std::string lists_the_flags() const;
  /// "lockstep train [FLAGS]".
  std::string usage() const;
  std::vector<std::string> headings() const;
  /// A word of each heading, to ask for it.
  std::vector<std::string> sections() const;
  /// For completion: a line for each flag or word, with tabs between its names, value and help.
  std::string table() const;

 private:
  std::string flags_of(const std::string& heading, size_t columns) const;
};

/// How a text is broken into lines.
struct Wrapping {
  size_t first_column = 0;  ///< Where the text begins: what stands before it in its first line.
  size_t indent = 0;        ///< Of further lines.
  size_t width = 80;
  std::string prefix = {};    ///< Begins further lines in place of the indentation.
  std::string line_end = {};  ///< Ends lines that go on. Then they end between words only.
};

/// The text, broken at blanks and, in a word that is longer than a line, after `|`, `,` and `/`.
std::string wrapped(const std::string& text, const Wrapping& how);

/// A command as an example in a help page, and above it what it shows. It can be copied: lines that
/// go on end in a backslash.
std::string example_lines(const std::string& command, const std::string& what, size_t width);

/// The help page of a command such as "lockstep train" as a page for man(1). `release` is
/// "0.1.0,2026-12-31".
std::string man_page(const std::string& command, const std::string& summary,
                     const std::string& help, const std::string& release);

}  // namespace lockstep::tool
