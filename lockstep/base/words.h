#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// The known words that a mistyped one may stand for, at most three. The first of these that finds
/// any:
/// - the same word but for its case,
/// - words that it begins ("--nproc" of "--nproc-per-node"),
/// - the nearest by edit distance,
/// - words of which it is or begins a later part ("--epochs" of "--max-epochs").
std::vector<std::string> similar_words(std::string_view word,
                                       const std::vector<std::string>& known);

/// "did you mean 'mlp'?" or "did you mean 'a' or 'b'?"; empty when no known word is similar.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& known);

/// "unknown KIND 'WORD'; did you mean 'X'?" Where no known word is similar: "...; known: A, B".
std::string unknown_word(std::string_view kind, std::string_view word,
                         const std::vector<std::string>& known);

/// Throws UsageError unless `word` is one of `known`. All flags have this one wording:
/// "--backend: unknown value 'glo'; expected one of auto, gloo, nccl", with `did_you_mean` as hint.
void expect_one_of(const std::string& flag, const std::string& word,
                   const std::vector<std::string>& known);

/// "1,234,567".
std::string with_thousands(int64_t number);

/// "1 epoch", "2 epochs", "3 batches", "1,024 steps".
std::string counted(int64_t number, const std::string& noun);

}  // namespace lockstep
