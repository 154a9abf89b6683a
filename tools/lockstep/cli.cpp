#include "cli.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cli_help.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/launch/error_file.h"

namespace lockstep::tool {
namespace {

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.12g", value);
  return text;
}

std::string range_text(Range range) {
  if (std::isfinite(range.min) && std::isfinite(range.max)) {
    return " from " + number_text(range.min) + " to " + number_text(range.max);
  }
  if (std::isfinite(range.min)) return " of at least " + number_text(range.min);
  if (std::isfinite(range.max)) return " of at most " + number_text(range.max);
  return {};
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
    if (!value || !in_range(*value, range)) bad_value(name, text, "a number" + range_text(range));
    return *value;
  } else {
    range.min = std::max(range.min, static_cast<double>(std::numeric_limits<T>::min()));
    const bool bounded = std::isfinite(range.max);
    const auto expected =
        "a whole number" + (std::is_same_v<T, int64_t> && !bounded && range.min < -1e18
                                ? std::string()
                                : range_text(range));
    const auto value = parse_int(text);
    if (!value || !in_range(static_cast<double>(*value), range) ||
        (sizeof(T) < sizeof(int64_t) && *value > int64_t{std::numeric_limits<int>::max()})) {
      bad_value(name, text, expected);
    }
    return static_cast<T>(*value);
  }
}

/// `--max_epochs=3` becomes `--max-epochs=3`.
std::string with_dashes(const std::string& word) {
  if (word.rfind("--", 0) != 0) return word;
  std::string changed = word;
  const size_t end = std::min(word.find('='), word.size());
  std::replace(changed.begin(), changed.begin() + static_cast<std::ptrdiff_t>(end), '_', '-');
  return changed;
}

bool is_number(const std::string& word) {
  return parse_double(word).has_value();
}

}  // namespace

struct Cli::Impl : HelpPage {
  CLI::App app;
  std::string group = "Options";
  std::vector<std::string>* trailing = nullptr;
  bool help_asked = false;

  OptionInfo& add(const std::string& names, const std::string& placeholder, const std::string& help,
                  const std::string& shown_default) {
    options.push_back({split(names, ','), placeholder, help, shown_default, group, nullptr});
    return options.back();
  }

  const OptionInfo* find(const std::string& name) const {
    for (const auto& info : options) {
      if (info.has(name)) return &info;
    }
    return nullptr;
  }

  std::vector<std::string> all_names() const {
    std::vector<std::string> names;
    for (const auto& info : options)
      names.insert(names.end(), info.names.begin(), info.names.end());
    return names;
  }

  void add_value(const std::string& names, const std::string& placeholder, const std::string& help,
                 const std::string& shown_default, std::function<void(const std::string&)> set) {
    auto& info = add(names, placeholder, help, shown_default);
    info.option = app.add_option_function<std::vector<std::string>>(
        names, [set](const std::vector<std::string>& texts) {
          for (const auto& text : texts) set(text);
        });
    info.option->expected(1)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    info.option->allow_extra_args(false);
  }

  template <class T>
  void add_number(const std::string& names, T& value, const std::string& help, Range range) {
    const auto name = split(names, ',').back();
    add_value(names, std::is_floating_point_v<T> ? "X" : "N", help,
              number_text(static_cast<double>(value)),
              [&value, name, range](const std::string& text) {
                value = parse_number<T>(name, text, range);
              });
  }

  template <class T>
  void add_number(const std::string& names, std::optional<T>& value, const std::string& help,
                  Range range) {
    const auto name = split(names, ',').back();
    add_value(names, std::is_floating_point_v<T> ? "X" : "N", help,
              value ? number_text(static_cast<double>(*value)) : "",
              [&value, name, range](const std::string& text) {
                value = parse_number<T>(name, text, range);
              });
  }

  [[noreturn]] void unknown_flag(const std::string& word) const {
    const auto name = word.substr(0, word.find('='));
    std::string message = "unknown flag '" + name + "'";
    if (const auto near = nearest(with_dashes(name), all_names())) {
      message += "; did you mean '" + *near + "'?";
    }
    throw UsageError(message, "'" + command + " --help' lists the flags");
  }

  /// How many of `args` are ours: all up to the first word that is neither a flag nor its value.
  /// Checks the flags' names and that those which need a value have one.
  size_t own_words(const std::vector<std::string>& args) const {
    size_t i = 0;
    while (i < args.size()) {
      const std::string word = with_dashes(args[i]);
      if (word == "--" || word.size() < 2 || word[0] != '-' || is_number(word)) {
        if (trailing || word == "--") return i;
        ++i;
        continue;
      }
      const auto* info = flag_of(word);
      if (!info) unknown_flag(args[i]);
      const bool joined =
          word.find('=') != std::string::npos || (word[1] != '-' && word.size() > 2 && !find(word));
      ++i;
      if (info->placeholder.empty()) {
        if (word.find('=') != std::string::npos) {
          throw UsageError(info->main_name() + " takes no value, but was given as '" + args[i - 1] +
                           "'");
        }
        continue;
      }
      if (joined) continue;
      if (i == args.size() || (args[i].rfind("--", 0) == 0 && find(with_dashes(args[i])))) {
        throw UsageError(info->main_name() + " needs a value (" + info->placeholder + ")");
      }
      ++i;
    }
    return i;
  }

  const OptionInfo* flag_of(const std::string& word) const {
    if (word[1] == '-') return find(word.substr(0, word.find('=')));
    if (const auto* whole = find(word)) return whole;
    const auto* first = find(word.substr(0, 2));
    return first && !first->placeholder.empty() ? first : nullptr;
  }

  void take_positionals(const std::vector<std::string>& words) {
    for (size_t i = 0; i < words.size(); ++i) {
      if (i >= positionals.size()) {
        throw UsageError("unexpected argument '" + words[i] + "'",
                         "'" + command + " --help' shows the usage");
      }
      *positionals[i].value = words[i];
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
  impl_->app.set_help_flag();
  impl_->app.allow_extras();
}

Cli::~Cli() = default;

void Cli::group(const std::string& title) {
  impl_->group = title;
}

void Cli::example(const std::string& command_line, const std::string& what) {
  impl_->examples.emplace_back(command_line, what);
}

void Cli::flag(const std::string& names, bool& value, const std::string& help) {
  auto& info = impl_->add(names, "", help, "");
  info.option = impl_->app.add_flag_callback(names, [&value] { value = true; });
}

void Cli::negatable_flag(const std::string& name, bool& value, const std::string& help) {
  const auto negated = "--no-" + name.substr(2);
  auto& info = impl_->add(negated + "," + name, "", help, value ? "on" : "off");
  info.option = impl_->app.add_flag_function(name + ",!" + negated,
                                             [&value](int64_t count) { value = count > 0; });
  info.option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
}

void Cli::option(const std::string& names, std::string& value, const std::string& help,
                 const std::string& placeholder) {
  impl_->add_value(names, placeholder, help, value,
                   [&value](const std::string& text) { value = text; });
}

void Cli::option(const std::string& names, int& value, const std::string& help, Range range) {
  impl_->add_number(names, value, help, range);
}

void Cli::option(const std::string& names, int64_t& value, const std::string& help, Range range) {
  impl_->add_number(names, value, help, range);
}

void Cli::option(const std::string& names, uint64_t& value, const std::string& help, Range range) {
  impl_->add_number(names, value, help, range);
}

void Cli::option(const std::string& names, double& value, const std::string& help, Range range) {
  impl_->add_number(names, value, help, range);
}

void Cli::option(const std::string& names, std::optional<int>& value, const std::string& help,
                 Range range) {
  impl_->add_number(names, value, help, range);
}

void Cli::option(const std::string& names, std::optional<int64_t>& value, const std::string& help,
                 Range range) {
  impl_->add_number(names, value, help, range);
}

void Cli::option(const std::string& names, std::optional<double>& value, const std::string& help,
                 Range range) {
  impl_->add_number(names, value, help, range);
}

void Cli::option(const std::string& names, std::optional<std::string>& value,
                 const std::string& help, const std::string& placeholder) {
  impl_->add_value(names, placeholder, help, value.value_or(""),
                   [&value](const std::string& text) { value = text; });
}

void Cli::list(const std::string& names, std::vector<std::string>& values, const std::string& help,
               const std::string& placeholder) {
  const auto name = split(names, ',').back();
  impl_->add_value(names, placeholder, help, join(values, ","),
                   [&values, name](const std::string& text) {
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
  impl_->add_value(names, "N1,N2", help, join(shown, ","),
                   [&values, name, range](const std::string& text) {
                     values.clear();
                     for (const auto& part : split(text, ',')) {
                       values.push_back(parse_number<int64_t>(name, part, range));
                     }
                   });
}

void Cli::choice(const std::string& names, std::string& value,
                 const std::vector<std::string>& choices, const std::string& help) {
  const auto name = split(names, ',').back();
  impl_->add_value(names, join(choices, "|"), help, value,
                   [&value, name, choices](const std::string& text) {
                     if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
                       throw UsageError(unknown_word("value of " + name + ",", text, choices),
                                        name + " takes " + join(choices, ", "));
                     }
                     value = text;
                   });
}

void Cli::custom(const std::string& names, const std::string& placeholder, const std::string& help,
                 const std::string& shown_default, std::function<void(const std::string&)> set) {
  impl_->add_value(names, placeholder, help, shown_default, std::move(set));
}

void Cli::positional(const std::string& name, std::string& value, const std::string& help,
                     bool required) {
  impl_->positionals.push_back({name, help, &value, required});
}

void Cli::trailing(const std::string& name, std::vector<std::string>& words,
                   const std::string& help) {
  impl_->trailing_name = name;
  impl_->trailing_help = help;
  impl_->trailing = &words;
}

bool Cli::parse(const std::vector<std::string>& args) {
  auto& impl = *impl_;
  if (!impl.find("--help")) {
    impl.group = "Help";
    flag("-h,--help", impl.help_asked, "Print this text and exit");
  }
  const size_t count = impl.own_words(args);
  std::vector<std::string> own;
  for (size_t i = 0; i < count; ++i) own.push_back(with_dashes(args[i]));
  std::vector<std::string> rest(args.begin() + static_cast<std::ptrdiff_t>(count), args.end());
  if (!rest.empty() && rest.front() == "--") rest.erase(rest.begin());
  try {
    std::vector<std::string> reversed(own.rbegin(), own.rend());
    impl.app.parse(std::move(reversed));
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what(), "'" + impl.command + " --help' lists the flags");
  }
  if (impl.help_asked) {
    std::fputs(help(help_width()).c_str(), stdout);
    std::fflush(stdout);
    return false;
  }
  auto words = impl.app.remaining();
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
  return info && info->option && info->option->count() > 0;
}

std::vector<std::string> Cli::long_names() const {
  std::vector<std::string> names;
  for (const auto& info : impl_->options) {
    for (const auto& name : info.names) {
      if (name.rfind("--", 0) == 0) names.push_back(name);
    }
  }
  return names;
}

std::string Cli::help(int width) const {
  return impl_->text(width);
}

int run_guarded(const std::string& command, const std::function<int()>& body) {
  std::string message;
  int code = kExitFailure;
  try {
    return body();
  } catch (const InterruptedError& error) {
    message = command + ": " + error.what() + "\n";
    code = error.exit_code();
    launch::write_error_file(error);
  } catch (const std::exception& error) {
    message = command + ": error: " + error.what() + "\n";
    code = exit_code_of(error);
    launch::write_error_file(error);
  } catch (...) {
    message = command + ": error: an exception of an unknown type\n";
  }
  std::fflush(stdout);
  if (!launch::parent_reports_errors()) std::fputs(message.c_str(), stderr);
  return code;
}

}  // namespace lockstep::tool
