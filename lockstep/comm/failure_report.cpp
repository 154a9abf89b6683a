#include "lockstep/comm/failure_report.h"

#include <algorithm>
#include <map>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/errors.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

struct Findings {
  std::vector<int> ended;
  std::vector<int> silent;
  std::map<int, std::string> words;  ///< What the ranks that failed as well were doing.
  bool store_lost = false;
};

std::string failed_key(int rank) {
  return "failed/" + std::to_string(rank);
}

bool is_p2p(Operation operation) {
  return operation >= Operation::send;
}

std::string what_i_did(const CheckContext& context, const CallSummary& call) {
  std::string text = describe(call, context.names());
  if (is_p2p(call.operation) || call.sequence == 0)
    return text + " in group '" + context.group() + "'";
  return text + ", collective " + std::to_string(call.sequence) + " of group '" + context.group() +
         "',";
}

/// One look at the store and the processes; true when the cause is known.
bool look(CheckContext& context, const std::vector<int>& peers, Findings& findings) {
  findings.silent.clear();
  for (int rank : peers) {
    if (findings.words.count(rank)) continue;
    if (context.store().check({failed_key(rank)})) {
      findings.words[rank] = context.store().get_to_str(failed_key(rank));
    } else {
      findings.silent.push_back(rank);
    }
  }
  findings.ended = context.ended(findings.silent);
  return !findings.ended.empty() || findings.silent.empty();
}

Findings investigate(CheckContext& context, const CallSummary& call,
                     const std::vector<int>& peers) {
  Findings findings;
  findings.silent = peers;
  const auto deadline = Clock::now() + kReportPatience;
  try {
    context.store().set(failed_key(context.rank()), what_i_did(context, call));
    while (!look(context, peers, findings) && Clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
  } catch (const std::exception&) {
    findings.store_lost = true;
    findings.ended = context.ended(peers);
    while (findings.ended.empty() && Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      findings.ended = context.ended(peers);
    }
  }
  return findings;
}

std::string name_ended(CheckContext& context, const std::vector<int>& ended) {
  std::vector<std::string> parts;
  for (int rank : ended) parts.push_back(context.name_with_process(rank));
  return join(parts, ", ") + (ended.size() == 1 ? " has ended" : " have ended");
}

/// The sentences after the colon.
std::string cause(CheckContext& context, const Findings& findings) {
  if (!findings.ended.empty()) return name_ended(context, findings.ended);
  std::vector<std::string> parts;
  if (!findings.silent.empty())
    parts.push_back("no word from " + rank_list(findings.silent, context.names()) +
                    (findings.silent.size() == 1 ? ", which" : ", who") +
                    " did not come, is lost or still waits");
  for (const auto& [rank, word] : findings.words)
    parts.push_back(rank_list({rank}, context.names()) + " failed in " + word);
  if (findings.store_lost)
    parts.push_back("the store, held by rank 0 or the launcher, is lost as well");
  return join(parts, "; ");
}

}  // namespace

std::exception_ptr translate_failure(const std::exception_ptr& error, CheckContext& context,
                                     const CallSummary& call, std::chrono::milliseconds timeout,
                                     std::vector<int> peers) {
  const FailureKind kind = failure_kind(error);
  if (kind != FailureKind::timeout && kind != FailureKind::connection) return error;
  if (peers.empty()) peers = context.others();
  const Findings findings = investigate(context, call, peers);
  std::string text = context.me() + ": " + what_i_did(context, call);
  text += kind == FailureKind::timeout
              ? " did not finish within " + seconds_text(timeout)
              : " lost its connection to " + rank_list(peers, context.names());
  const std::string why = cause(context, findings);
  if (!why.empty()) text += ": " + why;
  text += " [" + failure_text(error) + "]";
  if (kind == FailureKind::connection || !findings.ended.empty())
    return std::make_exception_ptr(
        PeerLostError(text, "look at what the lost rank printed last; it is the cause"));
  return std::make_exception_ptr(TimeoutError(
      text,
      "do all ranks make the same calls? Else give a longer time-out, or LOCKSTEP_DEBUG=detail"));
}

std::exception_ptr short_wait_error(const CheckContext& context, const CallSummary& call,
                                    std::chrono::milliseconds timeout) {
  return std::make_exception_ptr(TimeoutError(context.me() + ": " + what_i_did(context, call) +
                                              " is not finished after " + seconds_text(timeout) +
                                              "; it goes on"));
}

}  // namespace lockstep
