#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::tool {

/// The smallest and largest number that an option takes, both included.
struct Range {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
};

/// As the only argument it has a command print HelpPage::table (cli_help.h).
inline constexpr const char* kFlagTable = "--flag-table";

/// As the only argument it has, with "VERSION,DATE" behind it, a command print its page for man(1).
inline constexpr std::string_view kManPage = "--man-page=";

/// What a flag is given in these words, as "--flag value" or "--flag=value"; the last one counts.
std::optional<std::string> value_of_flag(const std::vector<std::string>& words,
                                         const std::string& flag);

/// `--max_epochs=a_b` becomes `--max-epochs=a_b`. Other words stay.
std::string with_dashes(const std::string& word);

/// The flags of a program or subcommand, with the conventions of torchrun and git.
///
/// A name is "--max-epochs" or "-t,--tee". `--max_epochs` and `--max-epochs=3` are understood too.
/// If a flag is given twice, the last value counts. An option whose placeholder has a comma, "A,B",
/// takes a list: given twice, its values are joined by commas. Values are stored in the variables
/// given here, whose initial value is shown as the default in --help. The variables must outlive
/// `parse`. A mistake throws UsageError, which names the flag, the value, what was expected and
/// similar known flags.
class Cli {
 public:
  /// `command` as the user types it: "lockstep train".
  Cli(std::string command, std::string summary);
  ~Cli();
  Cli(const Cli&) = delete;
  Cli& operator=(const Cli&) = delete;

  /// The heading in --help of the options that are added from here on.
  void group(const std::string& title);
  /// A line under "Examples:" in --help.
  void example(const std::string& command_line, const std::string& what = {});

  /// Sets `value` to true when given.
  void flag(const std::string& names, bool& value, const std::string& help);
  void option(const std::string& names, std::string& value, const std::string& help,
              const std::string& placeholder = "TEXT");
  /// T is int, int64_t, double or an optional of one of these.
  template <class T>
  void option(const std::string& names, T& value, const std::string& help, Range range = {});
  void option(const std::string& names, std::optional<std::string>& value, const std::string& help,
              const std::string& placeholder = "TEXT");
  /// As torch.manual_seed takes it: from -2^63 to 2^64 - 1, where a negative one stands for itself
  /// and 2^64.
  void seed(const std::string& names, uint64_t& value, const std::string& help);
  /// Comma-separated words or numbers: --sizes 4,1024,65536.
  void list(const std::string& names, std::vector<std::string>& values, const std::string& help,
            const std::string& placeholder = "A,B");
  void list(const std::string& names, std::vector<int64_t>& values, const std::string& help,
            Range range = {});
  /// One of `choices`. Anything else is refused with the nearest one.
  void choice(const std::string& names, std::string& value, const std::vector<std::string>& choices,
              const std::string& help);
  /// Calls `set` with the text of each occurrence, in order. `set` throws UsageError for a bad one.
  /// For what the overloads above do not cover.
  void custom(const std::string& names, const std::string& placeholder, const std::string& help,
              const std::string& shown_default, std::function<void(const std::string&)> set);
  /// Names in other tools for the flag `name`, such as "--gpus" for "--devices". They are not
  /// accepted, but the error message suggests the flag.
  void also_called(const std::string& name, const std::vector<std::string>& words);
  /// Makes the flag one of the common ones, with this text in a line. Where a command has such,
  /// --help prints them alone, and --help-all prints all.
  void common(const std::string& name, const std::string& line);
  /// A word without dashes, in the order of these calls: `lockstep eval WEIGHTS`; one of `choices`
  /// where there are some.
  void positional(const std::string& name, std::string& value, const std::string& help,
                  bool required = true, const std::vector<std::string>& choices = {});
  void positional(const std::string& name, int& value, const std::string& help, Range range = {});
  /// The last: one word or more.
  void positional(const std::string& name, std::vector<std::string>& values,
                  const std::string& help);
  /// Everything from the first word without dashes on, untouched: `lockstep run PROGRAM ARGS`.
  void trailing(const std::string& name, std::vector<std::string>& words, const std::string& help);

  /// Before `parse`, whose words win: values of the options so far from variables such as
  /// PET_MAX_RESTARTS, with the prefix "PET_". Throws UsageError, which names the variable.
  void defaults_from_environment(const std::string& prefix);
  /// Before `parse`, likewise: the value that a configuration file has for "--lr", of a flag
  /// without a value "true" or "false". Empty: an option without a default stays unset. Throws
  /// UsageError, which begins with `where`.
  void configure(const std::string& name, const std::string& value, const std::string& where);
  /// Reads the words after the subcommand's name. False when --help was asked for and printed: the
  /// command then returns 0. "--help files" prints the heading alone that has a word which begins
  /// so. Throws UsageError.
  [[nodiscard]] bool parse(const std::vector<std::string>& args);
  /// True when the user gave the option ("--lr"), by any of its names. After `parse`.
  bool given(const std::string& name) const;
  /// The text of --help-all, wrapped to `width` columns.
  std::string help(int width) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Writes to standard output, after what stdio still holds. Throws SystemError.
void print(const std::string& text);

/// Runs `body`, prints what it throws ("lockstep train: error: ...") to standard error and returns
/// the exit code for it. A standard output that could not be written is an error too. In a worker
/// whose parent reports failures (`spawn`), the error goes into the launcher's error file instead,
/// so that it is printed once.
int run_guarded(const std::string& command, const std::function<int()>& body);

/// Columns of the terminal, within 40 and 100; 80 when the output is none.
int help_width();

}  // namespace lockstep::tool
