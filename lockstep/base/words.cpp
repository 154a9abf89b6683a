#include "lockstep/base/words.h"

#include <algorithm>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr size_t kMostSuggestions = 3;

std::string_view without_dashes(std::string_view word) {
  return word.substr(std::min(word.find_first_not_of('-'), word.size()));
}

/// How many letters must be added, left out, replaced or swapped with the next
/// (Damerau-Levenshtein).
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substitution = d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, substitution});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

/// The word nearest to a mistyped one; none where none is near enough to be what was meant.
std::optional<std::string> nearest(std::string_view word, const std::vector<std::string>& known) {
  const std::string lower = to_lower(word);
  std::optional<std::string> best;
  size_t best_distance = std::max<size_t>(1, word.size() / 3) + 1;
  for (const auto& candidate : known) {
    const size_t distance = edit_distance(lower, to_lower(candidate));
    if (distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
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

std::string unknown_word(std::string_view kind, std::string_view word,
                         const std::vector<std::string>& known) {
  const std::string meant = did_you_mean(word, known);
  return "unknown " + std::string(kind) + " '" + std::string(word) + "'; " +
         (meant.empty() ? "known: " + join(known, ", ") : meant);
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
  // "epochs", but "batches".
  const bool hisses =
      noun.ends_with("tch") || noun.ends_with("sh") || noun.ends_with("ss") || noun.ends_with("x");
  const char* const plural = hisses ? "es" : "s";
  return with_thousands(number) + " " + noun + (number == 1 ? "" : plural);
}

}  // namespace lockstep
