#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/rendezvous/job_environment.h"

namespace lockstep {
namespace {

[[noreturn]] void throw_malformed(const std::string& list) {
  throw UsageError("Slurm's node list '" + list + "' does not parse: expected names such as " +
                   "node[01-03,7],gpu-a");
}

// Splits at commas that are outside brackets.
std::vector<std::string> split_outside(const std::string& list) {
  std::vector<std::string> parts(1);
  int depth = 0;
  for (const char c : list) {
    if (c == '[') ++depth;
    if (c == ']') --depth;
    if (depth < 0 || depth > 1) throw_malformed(list);
    if (c == ',' && depth == 0) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  if (depth != 0) throw_malformed(list);
  return parts;
}

// "01-03" as 01, 02, 03: numbers keep the width of the first.
void append_range(const std::string& range, const std::string& list,
                  std::vector<std::string>& out) {
  const auto dash = range.find('-');
  const std::string low_text = range.substr(0, dash);
  const std::string high_text = dash == std::string::npos ? low_text : range.substr(dash + 1);
  const auto low = parse_int(low_text);
  const auto high = parse_int(high_text);
  constexpr int64_t kMostNodes = 1'000'000;
  if (!low || !high || *low < 0 || *high < *low || *high - *low > kMostNodes) throw_malformed(list);
  for (int64_t i = *low; i <= *high; ++i) {
    std::string number = std::to_string(i);
    if (number.size() < low_text.size()) number.insert(0, low_text.size() - number.size(), '0');
    out.push_back(number);
  }
}

// One name with any number of bracketed parts, the first of which varies slowest.
std::vector<std::string> expand_name(const std::string& name, const std::string& list) {
  const auto open = name.find('[');
  if (open == std::string::npos) {
    if (name.empty()) throw_malformed(list);
    return {name};
  }
  const auto close = name.find(']', open);
  if (close == std::string::npos) throw_malformed(list);
  std::vector<std::string> numbers;
  for (const auto& range : split(name.substr(open + 1, close - open - 1), ',')) {
    append_range(range, list, numbers);
  }
  const std::string rest = name.substr(close + 1);
  const std::vector<std::string> tails =
      rest.empty() ? std::vector<std::string>{""} : expand_name(rest, list);
  std::vector<std::string> names;
  for (const auto& number : numbers) {
    for (const auto& tail : tails) names.push_back(name.substr(0, open) + number + tail);
  }
  return names;
}

}  // namespace

std::vector<std::string> expand_slurm_nodelist(const std::string& list) {
  std::vector<std::string> names;
  for (const auto& part : split_outside(list)) {
    const auto expanded = expand_name(part, list);
    names.insert(names.end(), expanded.begin(), expanded.end());
  }
  return names;
}

}  // namespace lockstep
