#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "lockstep/base/used_numbers.h"

// How agents and the embedded registry prove to each other that they know the job's token, without
// telling it. The server has a nonce of its own, which it tells everyone. A client makes a nonce of
// its own for each session. The session's key is the HMAC-SHA256 of both under the token. Behind
// each request stand, after tabs, the session, a number that counts up, and an HMAC under the key
// over path, number and text. Behind each line of an answer stands an HMAC that also holds the
// request's number, the line's and the HTTP status. So nobody without the token can ask, answer,
// change, repeat or reorder anything. Nothing is encrypted.
namespace lockstep::elastic {

/// Where a client asks for the server's nonce: `{"nonce": "..."}`.
inline constexpr const char* kNoncePath = "/lockstep/nonce";

/// The token in a file, or, without a file, in an environment variable; none without both. Blanks
/// around it do not count. Throws UsageError where others may read or write the file (its mode must
/// be 0600 or 0400), or the token has fewer than 16 characters. SystemError: it cannot be read.
std::optional<std::string> read_token(const std::filesystem::path& file,
                                      const std::string& variable);

/// What seals and checks the lines of an answer, on both sides.
struct AnswerSeal {
  std::string key{};
  uint64_t number = 0;  ///< The request's.
  /// `index`: the line's number within the answer.
  std::string seal(int status, uint64_t index, const std::string& line) const;
  /// The line without its seal; none where that is not right.
  std::optional<std::string> open(int status, uint64_t index, const std::string& sealed) const;
};

/// A client's session. One thread at a time.
class ProofSession {
 public:
  ProofSession(const std::string& token, const std::string& server_nonce);
  /// The request with its proof. `answer` gets what its answer is checked with.
  std::string seal(const std::string& path, const std::string& text, AnswerSeal& answer);

 private:
  const std::string nonce_;
  const std::string key_;
  uint64_t number_ = 0;
};

/// The server's side. Any thread.
class ProofChecker {
 public:
  explicit ProofChecker(std::string token);
  const std::string& nonce() const { return nonce_; }

  struct Opened {
    std::string text;
    AnswerSeal answer;
  };
  /// The request without its proof. None where that is missing, wrong, or was used before; then a
  /// warning names `sender`, at most one in 10 s.
  std::optional<Opened> open(const std::string& path, const std::string& sealed,
                             const std::string& sender);

 private:
  /// What is wrong with it; null: nothing.
  const char* check(const std::string& path, const std::string& sealed, Opened& opened);
  void warn(const char* problem, const std::string& sender);

  /// Far more than the requests that a client has under way.
  using Used = UsedNumbers<1024>;

  const std::string token_;
  const std::string nonce_;
  std::mutex mutex_;
  std::map<std::string, Used> sessions_;  ///< By the client's nonce. Only of those with the token.
  std::optional<std::chrono::steady_clock::time_point> last_warning_;
};

}  // namespace lockstep::elastic
