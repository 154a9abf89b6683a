#include "lockstep/tool/cli.h"

#include <stdio_ext.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <exception>
#include <map>
#include <new>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/terminal.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/launch/error_file.h"
#include "lockstep/tool/cli_help.h"

namespace lockstep::tool {
namespace {

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.12g", value);
  return text;
}

/// What follows "a number of" or, where the range has two ends, "a number".
std::string range_text(Range range) {
  if (std::isfinite(range.min) && std::isfinite(range.max)) {
    return "from " + number_text(range.min) + " to " + number_text(range.max);
  }
  if (std::isfinite(range.min)) return "at least " + number_text(range.min);
  if (std::isfinite(range.max)) return "at most " + number_text(range.max);
  return {};
}

std::string number_in(Range range, const std::string& kind) {
  const std::string text = range_text(range);
  if (text.empty()) return kind;
  return kind + (text.starts_with("from") ? " " : " of ") + text;
}

[[noreturn]] void bad_value(const std::string& name, const std::string& text,
                            const std::string& expected) {
  throw UsageError(name + ": '" + text + "' is not " + expected);
}

bool in_range(double value, Range range) {
  return value >= range.min && value <= range.max;
}

template <class T>
T parse_number(const std::string& name, const std::string& text, Range range) {
  if constexpr (std::is_floating_point_v<T>) {
    const auto value = parse_double(text);
    if (!value || !in_range(*value, range)) bad_value(name, text, number_in(range, "a number"));
    return *value;
  } else {
    range.min = std::max(range.min, static_cast<double>(std::numeric_limits<T>::min()));
    const bool any = !std::isfinite(range.max) && range.min < -1e18;
    const auto expected = number_in(any ? Range() : range, "a whole number");
    const auto value = parse_int(text);
    if (!value || !in_range(static_cast<double>(*value), range) ||
        (sizeof(T) < sizeof(int64_t) && *value > int64_t{std::numeric_limits<int>::max()})) {
      bad_value(name, text, expected);
    }
    return static_cast<T>(*value);
  }
}

uint64_t parse_seed(const std::string& name, const std::string& text) {
  if (const auto value = parse_int(text)) return static_cast<uint64_t>(*value);
  uint64_t value = 0;
  const auto* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end) {
    bad_value(name, text, "a whole number from -2^63 to 2^64 - 1");
  }
  return value;
}

/// Throws what kept standard output from being written, as a full disk does, and drops it.
void finish_output() {
  errno = 0;
  if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return;
  const int reason = errno;
  __fpurge(stdout);
  std::clearerr(stdout);
  if (reason != 0) throw SystemError("cannot write standard output", reason);
  throw Error("cannot write all of standard output");  // what hindered it was not kept
}

std::string text_of(const std::exception& error) {
  if (!dynamic_cast<const std::bad_alloc*>(&error)) return error.what();
  return "out of memory\n  hint: give a smaller --batch-size, or start fewer ranks on this host; "
         "`ulimit -v` shows whether a limit holds";
}

}  // namespace

std::string with_dashes(const std::string& word) {
  if (word.rfind("--", 0) != 0) return word;
  std::string changed = word;
  const size_t end = std::min(word.find('='), word.size());
  std::replace(changed.begin(), changed.begin() + static_cast<std::ptrdiff_t>(end), '_', '-');
  return changed;
}

std::optional<std::string> value_of_flag(const std::vector<std::string>& words,
                                         const std::string& flag) {
  std::optional<std::string> value;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string word = with_dashes(words[i]);
    if (word == flag && i + 1 < words.size()) value = words[i + 1];
    if (word.starts_with(flag + "=")) value = word.substr(flag.size() + 1);
  }
  return value;
}

struct Cli::Impl : HelpPage {
  std::string group = "Options";
  std::vector<std::string>* trailing = nullptr;
  bool help_asked = false;
  bool all_help_asked = false;
  std::map<std::string, std::string> other_words;  // of other tools, and the flag for each

  OptionInfo* find(const std::string& name) {
    for (auto& info : options) {
      if (info.has(name)) return &info;
    }
    return nullptr;
  }

  void give(OptionInfo& info, const std::string& value) {
    if (find(with_dashes(value)))
      throw UsageError(info.main_name() + " needs a value (" + info.placeholder + ")");
    info.given = true;
    info.set(value);
  }

  std::vector<std::string> all_names() const {
    std::vector<std::string> names;
    for (const auto& info : options)
      names.insert(names.end(), info.names.begin(), info.names.end());
    return names;
  }

  [[noreturn]] void unknown_flag(const std::string& word) const {
    const auto name = word.substr(0, word.find('='));
    const bool one_dash = name[1] != '-';  // "-lr", as other tools have it
    const auto dashed = with_dashes(one_dash ? "-" + name : name);
    const auto other = other_words.find(dashed);
    const auto meant = other == other_words.end() ? did_you_mean(dashed, all_names())
                                                  : "did you mean '" + other->second + "'?";
    throw UsageError("unknown flag '" + name + "'" + (meant.empty() ? "" : "; " + meant),
                     lists_the_flags());
  }

  struct Words {
    std::vector<std::pair<OptionInfo*, std::string>> flags;  // and their values
    std::vector<std::string> others;
    std::vector<std::string> rest;
  };

  /// CLI11 reads names with dashes as with underscores, as torchrun does.
  static std::string names_of(const OptionInfo& info) {
    std::vector<std::string> names = info.names;
    for (const std::string& name : info.names) {
      std::string other = name;
      std::replace(other.begin() + 2, other.end(), '-', '_');
      if (other != name) names.push_back(other);
    }
    return join(names, ",");
  }

  /// Flags, and words that are neither a flag nor its value. With `trailing` from the first of
  /// these on, else from "--" on, all is `rest`.
  Words take_apart(const std::vector<std::string>& args) {
    for (const auto& word : args) {  // CLI11 would take the next word.
      if (word.ends_with('=') && find(with_dashes(word.substr(0, word.size() - 1))))
        throw UsageError(word + " needs a value", lists_the_flags());
    }
    Words words;
    CLI::App app;
    app.set_help_flag();
    app.allow_extras()->prefix_command(trailing != nullptr);
    for (OptionInfo& info : options) {
      if (info.placeholder.empty()) {
        app.add_flag_callback(names_of(info), [&] { words.flags.emplace_back(&info, ""); });
        continue;
      }
      const auto take = [&](std::vector<std::string> values) {
        const bool is_list = info.placeholder.find(',') != std::string::npos;
        if (is_list) values = {join(values, ",")};
        for (const auto& value : values) words.flags.emplace_back(&info, value);
      };
      app.add_option_function<std::vector<std::string>>(names_of(info), take)
          ->type_name(info.placeholder)
          ->expected(1)
          ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
          ->allow_extra_args(false);
    }
    try {
      app.parse(std::vector<std::string>(args.rbegin(), args.rend()));
    } catch (const CLI::ArgumentMismatch&) {  // Else the next word is the value.
      throw UsageError(args.back() + " needs a value", lists_the_flags());
    } catch (const CLI::ParseError& error) {
      throw UsageError(error.what(), lists_the_flags());
    }
    const auto others = app.remaining();
    auto end = others.begin();
    for (; end != others.end() && *end != "--"; ++end) {
      if (end->size() > 1 && end->front() == '-' && !parse_double(*end)) unknown_flag(*end);
      if (trailing) break;
      words.others.push_back(*end);
    }
    words.rest.assign(end != others.end() && *end == "--" ? end + 1 : end, others.end());
    return words;
  }

  void take_positionals(const std::vector<std::string>& words) {
    const bool takes_more = !positionals.empty() && positionals.back().several;
    for (size_t i = 0; i < words.size(); ++i) {
      if (i >= positionals.size() && !takes_more) {
        throw UsageError("unexpected argument '" + words[i] + "'",
                         "'" + command + " --help' shows the usage");
      }
      positionals[std::min(i, positionals.size() - 1)].set(words[i]);
    }
    for (size_t i = words.size(); i < positionals.size(); ++i) {
      if (positionals[i].required) {
        throw UsageError(positionals[i].name + " is missing: " + positionals[i].help,
                         "'" + command + " --help' shows the usage");
      }
    }
  }
};

Cli::Cli(std::string command, std::string summary) : impl_(std::make_unique<Impl>()) {
  impl_->command = std::move(command);
  impl_->summary = std::move(summary);
}

Cli::~Cli() = default;

void Cli::group(const std::string& title) {
  impl_->group = title;
}

void Cli::example(const std::string& command_line, const std::string& what) {
  impl_->examples.emplace_back(command_line, what);
}

void Cli::flag(const std::string& names, bool& value, const std::string& help) {
  custom(names, "", help, "", [&value](const std::string&) { value = true; });
}

void Cli::option(const std::string& names, std::string& value, const std::string& help,
                 const std::string& placeholder) {
  custom(names, placeholder, help, value, [&value](const std::string& text) { value = text; });
}

template <class T>
void Cli::option(const std::string& names, T& value, const std::string& help, Range range) {
  const auto name = split(names, ',').back();
  const std::optional shown = value;
  using Number = decltype(shown)::value_type;
  custom(names, std::is_floating_point_v<Number> ? "X" : "N", help,
         shown ? number_text(static_cast<double>(*shown)) : "",
         [&value, name, range](const std::string& text) {
           value = parse_number<Number>(name, text, range);
         });
}
template void Cli::option(const std::string&, int&, const std::string&, Range);
template void Cli::option(const std::string&, int64_t&, const std::string&, Range);
template void Cli::option(const std::string&, double&, const std::string&, Range);
template void Cli::option(const std::string&, std::optional<int>&, const std::string&, Range);
template void Cli::option(const std::string&, std::optional<int64_t>&, const std::string&, Range);
template void Cli::option(const std::string&, std::optional<double>&, const std::string&, Range);
void Cli::seed(const std::string& names, uint64_t& value, const std::string& help) {
  const auto name = split(names, ',').back();
  custom(names, "N", help, std::to_string(value),
         [&value, name](const std::string& text) { value = parse_seed(name, text); });
}

void Cli::option(const std::string& names, std::optional<std::string>& value,
                 const std::string& help, const std::string& placeholder) {
  custom(names, placeholder, help, value.value_or(""),
         [&value](const std::string& text) { value = text; });
}

void Cli::list(const std::string& names, std::vector<std::string>& values, const std::string& help,
               const std::string& placeholder) {
  const auto name = split(names, ',').back();
  custom(names, placeholder, help, join(values, ","), [&values, name](const std::string& text) {
    values = split(text, ',');
    for (const auto& value : values) {
      if (value.empty()) bad_value(name, text, "a comma-separated list");
    }
  });
}

void Cli::list(const std::string& names, std::vector<int64_t>& values, const std::string& help,
               Range range) {
  std::vector<std::string> shown;
  for (const auto value : values) shown.push_back(std::to_string(value));
  const auto name = split(names, ',').back();
  custom(names, "N1,N2", help, join(shown, ","), [&values, name, range](const std::string& text) {
    values.clear();
    for (const auto& part : split(text, ',')) {
      values.push_back(parse_number<int64_t>(name, part, range));
    }
  });
}

void Cli::choice(const std::string& names, std::string& value,
                 const std::vector<std::string>& choices, const std::string& help) {
  const auto name = split(names, ',').back();
  custom(names, join(choices, "|"), help, value, [&value, name, choices](const std::string& text) {
    expect_one_of(name, text, choices);
    value = text;
  });
}

void Cli::custom(const std::string& names, const std::string& placeholder, const std::string& help,
                 const std::string& shown_default, std::function<void(const std::string&)> set) {
  impl_->options.push_back({.names = split(names, ','),
                            .placeholder = placeholder,
                            .help = help,
                            .shown_default = shown_default,
                            .group = impl_->group,
                            .set = std::move(set)});
}

void Cli::also_called(const std::string& name, const std::vector<std::string>& words) {
  for (const auto& word : words) impl_->other_words[word] = name;
}

void Cli::common(const std::string& name, const std::string& line) {
  for (auto& info : impl_->options) {
    if (info.has(name)) info.line = line;
  }
}

void Cli::positional(const std::string& name, std::string& value, const std::string& help,
                     bool required, const std::vector<std::string>& choices) {
  const auto set = [&value, name, choices](const std::string& text) {
    if (!choices.empty()) expect_one_of(name, text, choices);
    value = text;
  };
  impl_->positionals.push_back({name, help, set, required, join(choices, "|")});
}

void Cli::positional(const std::string& name, int& value, const std::string& help, Range range) {
  impl_->positionals.push_back({name, help,
                                [&value, name, range](const std::string& text) {
                                  value = parse_number<int>(name, text, range);
                                },
                                true});
}

void Cli::positional(const std::string& name, std::vector<std::string>& values,
                     const std::string& help) {
  const auto add = [&values](const std::string& text) { values.push_back(text); };
  impl_->positionals.push_back({name, help, add, /*required=*/true, {}, /*several=*/true});
}

void Cli::trailing(const std::string& name, std::vector<std::string>& words,
                   const std::string& help) {
  impl_->trailing_name = name;
  impl_->trailing_help = help;
  impl_->trailing = &words;
}

void Cli::defaults_from_environment(const std::string& prefix) {
  for (auto& info : impl_->options) {
    std::string variable = prefix + info.main_name().substr(2);
    for (char& c : variable) c = c == '-' ? '_' : static_cast<char>(std::toupper(c));
    const auto value = env_string(variable);
    const bool is_flag = info.placeholder.empty();
    if (!value || (is_flag && !env_flag(variable))) continue;
    configure(info.main_name(), is_flag ? "true" : *value,
              "environment variable " + variable + ", the default of ");
  }
}

void Cli::configure(const std::string& name, const std::string& value, const std::string& where) {
  try {
    OptionInfo* const info = impl_->find(name);
    if (!info) impl_->unknown_flag(name);
    const bool is_flag = info->placeholder.empty();
    if (is_flag) expect_one_of(name, value, {"true", "false"});
    const bool leaves_it =
        is_flag ? value == "false" : value.empty() && info->shown_default.empty();
    if (!leaves_it) impl_->give(*info, value);
  } catch (const UsageError& error) {
    throw UsageError(where + error.what());
  }
}

bool Cli::parse(const std::vector<std::string>& args) {
  auto& impl = *impl_;
  if (!impl.find("--help")) {
    impl.group = "Help";
    flag("-h,--help", impl.help_asked,
         impl.has_common() ? "Print the common flags, or those of a section, and exit"
                           : "Print this text and exit");
    if (impl.has_common()) flag("--help-all", impl.all_help_asked, "Print all flags and exit");
  }
  if (args.size() == 1 && args[0].starts_with(kManPage)) {
    print(man_page(impl.command, impl.summary, impl.text(help_width()),
                   args[0].substr(kManPage.size())));
    return false;
  }
  if (args == std::vector<std::string>{kFlagTable}) {
    print(impl.table());
    return false;
  }
  auto [flags, words, rest] = impl.take_apart(args);
  for (const auto& [info, value] : flags) {
    impl.give(*info, value);
  }
  if (impl.help_asked || impl.all_help_asked) {
    words.insert(words.end(), rest.begin(), rest.end());
    const bool is_short = impl.has_common() && words.empty() && !impl.all_help_asked;
    print(is_short ? impl.short_text(help_width())
                   : impl.text(help_width(), words.empty() ? "" : words.front()));
    return false;
  }
  if (impl.trailing) {
    *impl.trailing = rest;
  } else {
    words.insert(words.end(), rest.begin(), rest.end());
  }
  impl.take_positionals(words);
  return true;
}

bool Cli::given(const std::string& name) const {
  const auto* info = impl_->find(name);
  return info && info->given;
}

std::string Cli::help(int width) const {
  return impl_->text(width);
}

void print(const std::string& text) {
  finish_output();
  write_all(STDOUT_FILENO, text.data(), text.size(), "standard output");
}

int run_guarded(const std::string& command, const std::function<int()>& body) {
  std::string message;
  int code = kExitFailure;
  try {
    const int result = body();
    finish_output();
    return result;
  } catch (const InterruptedError& error) {
    message = command + ": " + error.what() + "\n";
    code = error.exit_code();
    launch::write_error_file(error);
  } catch (const std::exception& error) {
    message = command + ": error: " + text_of(error) + "\n";
    code = exit_code_of(error);
    launch::write_error_file(error);
  } catch (...) {
    message = command + ": error: an exception of an unknown type\n";
  }
  std::fflush(stdout);
  if (!launch::parent_reports_errors())
    std::fputs((std::string(line_start(STDERR_FILENO)) + message).c_str(), stderr);
  return code;
}

}  // namespace lockstep::tool
