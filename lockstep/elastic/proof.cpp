#include "lockstep/elastic/proof.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/hmac.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/elastic/gateway.h"

namespace lockstep::elastic {
namespace {

constexpr size_t kShortestToken = 16;
constexpr size_t kLongestToken = 4096;
constexpr size_t kMostSessions = 1 << 16;
constexpr size_t kNonceBytes = 16;
constexpr std::chrono::seconds kBetweenWarnings{10};

std::string token_in_file(const std::filesystem::path& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0)
    throw SystemError("cannot read the token file " + path.string(), errno);
  if (!S_ISREG(status.st_mode) || (status.st_mode & 0177) != 0) {
    throw UsageError("the token file " + path.string() +
                         " must be a regular file that only its owner may read (mode 0600)",
                     "chmod 600 " + path.string());
  }
  return read_file("/proc/self/fd/" + std::to_string(file.get()), kLongestToken);
}

/// The keys are random texts of a fixed length, and no path has a line's end.
std::string request_code(const std::string& key, const std::string& path, uint64_t number,
                         const std::string& text) {
  return to_base64(
      hmac_sha256(key, "request\n" + path + "\n" + std::to_string(number) + "\n" + text));
}

std::string session_key(const std::string& token, const std::string& server,
                        const std::string& client) {
  return hmac_sha256(token, "session\n" + server + "\n" + client);
}

}  // namespace

std::optional<std::string> read_token(const std::filesystem::path& file,
                                      const std::string& variable) {
  const auto given = file.empty() ? env_string(variable) : token_in_file(file);
  if (!given) return std::nullopt;
  constexpr const char* kBlanks = " \t\r\n";
  const size_t begin = given->find_first_not_of(kBlanks);
  std::string token = begin == std::string::npos
                          ? ""
                          : given->substr(begin, given->find_last_not_of(kBlanks) + 1 - begin);
  if (token.size() < kShortestToken) {
    throw UsageError("the token in " + (file.empty() ? variable : file.string()) + " has " +
                         std::to_string(token.size()) + " characters; expected at least " +
                         std::to_string(kShortestToken),
                     "`openssl rand -hex 32` makes one");
  }
  return token;
}

std::string AnswerSeal::seal(int status, uint64_t index, const std::string& line) const {
  return line + "\t" +
         to_base64(hmac_sha256(key, "answer\n" + std::to_string(number) + "\n" +
                                        std::to_string(status) + "\n" + std::to_string(index) +
                                        "\n" + line));
}

std::optional<std::string> AnswerSeal::open(int status, uint64_t index,
                                            const std::string& sealed) const {
  std::string line = sealed.substr(0, sealed.rfind('\t'));
  if (!same_code(seal(status, index, line), sealed)) return std::nullopt;
  return line;
}

ProofSession::ProofSession(const std::string& token, const std::string& server_nonce)
    : nonce_(random_hex(kNonceBytes)), key_(session_key(token, server_nonce, nonce_)) {}

std::string ProofSession::seal(const std::string& path, const std::string& text,
                               AnswerSeal& answer) {
  answer = {key_, ++number_};
  return text + "\t" + nonce_ + "\t" + std::to_string(number_) + "\t" +
         request_code(key_, path, number_, text);
}

ProofChecker::ProofChecker(std::string token)
    : token_(std::move(token)), nonce_(random_hex(kNonceBytes)) {}

std::optional<ProofChecker::Opened> ProofChecker::open(const std::string& path,
                                                       const std::string& sealed,
                                                       const std::string& sender) {
  Opened opened;
  const std::lock_guard lock(mutex_);
  if (const char* problem = check(path, sealed, opened)) {
    warn(problem, sender);
    return std::nullopt;
  }
  return opened;
}

const char* ProofChecker::check(const std::string& path, const std::string& sealed,
                                Opened& opened) {
  const std::vector<std::string> parts = split(sealed, '\t');
  if (parts.size() != 4) return "has no proof of the token";
  const auto number = parse_int(parts[2]);
  if (!number || *number < 1 || parts[1].size() != 2 * kNonceBytes) return "has a damaged proof";
  opened.text = parts[0];
  opened.answer = {session_key(token_, nonce_, parts[1]), static_cast<uint64_t>(*number)};
  if (!same_code(request_code(opened.answer.key, path, opened.answer.number, opened.text),
                 parts[3]))
    return "has a wrong proof (another token, or it is for a server before this one)";
  // From here on the sender knows the token.
  if (sessions_.size() >= kMostSessions && !sessions_.contains(parts[1]))
    return "begins too many sessions";
  return sessions_[parts[1]].use(opened.answer.number) ? nullptr : "was sent before";
}

void ProofChecker::warn(const char* problem, const std::string& sender) {
  const auto now = std::chrono::steady_clock::now();
  if (last_warning_ && now - *last_warning_ < kBetweenWarnings) return;
  log_warning("the registry refuses a request from " + sender + ": it " + problem);
  last_warning_ = now;
}

}  // namespace lockstep::elastic
