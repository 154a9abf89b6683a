#include "lockstep/base/words.h"

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr size_t kMostSuggestions = 3;

std::string_view without_dashes(std::string_view word) {
  return word.substr(std::min(word.find_first_not_of('-'), word.size()));
}

template <class Matches>
std::vector<std::string> those(const std::vector<std::string>& known, const Matches& matches) {
  std::vector<std::string> found;
  for (const auto& candidate : known) {
    if (found.size() < kMostSuggestions && matches(candidate)) found.push_back(candidate);
  }
  return found;
}

}  // namespace

std::vector<std::string> similar_words(std::string_view word,
                                       const std::vector<std::string>& known) {
  const std::string lower = to_lower(word);
  const auto core = std::string(without_dashes(lower));
  if (core.size() < 2) return {};  // one letter could mean anything
  const auto same =
      those(known, [&](const auto& candidate) { return to_lower(candidate) == lower; });
  if (!same.empty()) return same;
  const auto begun =
      those(known, [&](const auto& candidate) { return to_lower(candidate).starts_with(lower); });
  if (!begun.empty()) return begun;
  if (const auto near = nearest(word, known)) return {*near};
  return those(known, [&](const std::string& candidate) {
    return to_lower(candidate).find("-" + core, 2) != std::string::npos;
  });
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& known) {
  const auto similar = similar_words(word, known);
  std::string text;
  for (size_t i = 0; i < similar.size(); ++i) {
    text += i == 0 ? "did you mean '" : i + 1 == similar.size() ? "' or '" : "', '";
    text += similar[i];
  }
  return text.empty() ? text : text + "'?";
}

void expect_one_of(const std::string& flag, const std::string& word,
                   const std::vector<std::string>& known) {
  if (std::find(known.begin(), known.end(), word) != known.end()) return;
  throw UsageError(flag + ": unknown value '" + word + "'; expected one of " + join(known, ", "),
                   did_you_mean(word, known));
}

std::string with_thousands(int64_t number) {
  const std::string digits = std::to_string(number);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    const bool inside = !text.empty() && text != "-";
    if (inside && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string counted(int64_t number, const std::string& noun) {
  return with_thousands(number) + " " + noun + (number == 1 ? "" : "s");
}

}  // namespace lockstep
