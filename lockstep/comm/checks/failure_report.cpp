#include "lockstep/comm/checks/failure_report.h"

#include <map>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/checks/failure_kind.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

/// A rank that dies may be seen a moment later than one that has left.
constexpr std::chrono::milliseconds kDeathsAfterLeaves{150};

/// Over most backends only a group's first calls are compared.
constexpr const char* kSameCallsHint =
    "Do all ranks make the same calls, with tensors of the same shapes, in loops of the same "
    "length? LOCKSTEP_DEBUG=detail compares every call";

struct Findings {
  const Clock::time_point begin = Clock::now();
  std::vector<int> ended;
  std::vector<int> silent;
  std::map<int, std::string> words;  ///< What the ranks that failed as well were doing.
  std::optional<Failure> seen;
  bool store_lost = false;
};

/// `goes_on`: as the begin of a sentence.
std::string what_i_did(const CheckContext& context, const CallSignature& call,
                       bool goes_on = true) {
  std::string text = describe(call, context.names());
  if (call.is_message() || call.sequence == 0) return text + " in group '" + context.group() + "'";
  return text + ", collective " + std::to_string(call.sequence) + " of group '" + context.group() +
         (goes_on ? "'," : "'");
}

/// One look at the store and the processes; true when no more need be waited for. A message has one
/// peer, whose silence says something; that of the others, who may be busy, does not.
bool look(CheckContext& context, int peer, Findings& findings) {
  findings.seen = context.seen_failure();
  std::vector<int> wordless, left;
  for (int rank : context.others()) {
    const auto word = context.word_of(rank);
    if (word) findings.words[rank] = *word;
    if (!word) (context.has_left_its_loop(rank) ? left : wordless).push_back(rank);
  }
  // Who left after its loop has not failed, and may have ended since.
  findings.ended = context.ended(wordless);
  if (findings.ended.empty() &&
      (wordless.empty() || Clock::now() - findings.begin >= kDeathsAfterLeaves))
    findings.ended = left;
  findings.silent = wordless;
  if (peer >= 0)
    findings.silent = findings.words.contains(peer) ? std::vector<int>() : std::vector<int>{peer};
  return !findings.ended.empty() || findings.seen || findings.silent.empty();
}

Findings investigate(CheckContext& context, const CallSignature& call) {
  Findings findings;
  const auto deadline = Clock::now() + kReportPatience;
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(10)); };
  context.tell_failed(what_i_did(context, call, /*goes_on=*/false));
  try {
    while (!look(context, call.peer(), findings) && Clock::now() < deadline) pause();
  } catch (const std::exception&) {
    findings.store_lost = true;
    const auto looked = [&] {
      findings.ended = context.ended(context.others());
      findings.seen = context.seen_failure();
      return !findings.ended.empty() || findings.seen;
    };
    while (!looked() && Clock::now() < deadline) pause();
  }
  return findings;
}

/// Who is at fault, as far as it is known without what others tell.
Failure root_cause(CheckContext& context, const Findings& findings) {
  if (!findings.ended.empty()) return context.end_of(findings.ended);
  Failure cause = findings.seen.value_or(Failure{.kind = Failure::Kind::late});
  if (findings.silent.empty() || (findings.seen && findings.seen->kind != Failure::Kind::gave_up))
    return cause;
  cause.text = (findings.seen ? describe(cause) + "; " : std::string()) + "no word from " +
               rank_list(findings.silent, context.names()) +
               (findings.silent.size() == 1 ? ", which" : ", who") +
               " made another call, did not come, is lost or still waits";
  for (const int rank : findings.silent)
    cause.ranks.push_back(context.member(rank, Failure::Kind::late));
  return cause;
}

/// The sentences after the colon.
std::string whole_cause(CheckContext& context, const Findings& findings, int peer,
                        const Failure& root) {
  std::vector<std::string> parts;
  if (auto words = describe(root); !words.empty()) parts.push_back(std::move(words));
  if (findings.store_lost)
    parts.push_back("the store, held by rank 0 or the launcher, is lost as well");
  for (const auto& [rank, word] : findings.words)
    if (findings.ended.empty() && (peer < 0 || rank == peer))
      parts.push_back(rank_list({rank}, context.names()) + " failed in " + word);
  return join(parts, "; ");
}

}  // namespace

std::exception_ptr translate_failure(const std::exception_ptr& error, CheckContext& context,
                                     const CallSignature& call, std::chrono::milliseconds timeout,
                                     const std::vector<int>& died) {
  const FailureKind kind = failure_kind(error);
  if (kind != FailureKind::timeout && !is_lost(kind)) return error;
  const int peer = call.peer();
  Findings findings = investigate(context, call);
  if (!died.empty()) findings.ended = died;
  const std::string mine = what_i_did(context, call);
  Failure failure = root_cause(context, findings);
  const std::string why = whole_cause(context, findings, peer, failure);
  if (!why.empty()) context.tell_failed(mine + " " + why);
  std::string text = context.me() + ": " + mine;
  text +=
      kind == FailureKind::timeout
          ? " did not finish within " + seconds_text(timeout)
          : " lost its connection to " +
                rank_list(peer < 0 ? context.others() : std::vector<int>{peer}, context.names());
  // The backend's own words, such as Gloo's, say no more than what was found out.
  text += why.empty() ? " [" + failure_text(error) + "]" : ": " + why;
  log_debug(mine + ": " + failure_text(error));
  const bool lost = !findings.ended.empty() || (findings.seen && !findings.seen->timed_out());
  if (is_lost(kind) || lost) {
    if (failure.timed_out()) failure.kind = Failure::Kind::unreachable;
    const bool may_live =
        failure.kind == Failure::Kind::unreachable || failure.kind == Failure::Kind::closed;
    if (!may_live || failure.has(Failure::Kind::left)) return failure_error(text, failure);
    return std::make_exception_ptr(
        PeerLostError(text, std::string(kPeerLostHint) + ". " + kSameCallsHint, failure));
  }
  failure.kind = Failure::Kind::late;
  return std::make_exception_ptr(
      TimeoutError(text, kSameCallsHint + std::string(". Else give a longer time-out"), failure));
}

std::exception_ptr short_wait_error(const CheckContext& context, const CallSignature& call,
                                    std::chrono::milliseconds timeout) {
  return std::make_exception_ptr(TimeoutError(context.me() + ": " + what_i_did(context, call) +
                                              " is not finished after " + seconds_text(timeout) +
                                              "; it goes on"));
}

}  // namespace lockstep
