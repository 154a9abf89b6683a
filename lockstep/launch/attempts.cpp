#include "lockstep/launch/attempts.h"

#include <algorithm>
#include <cctype>

#include "lockstep/base/error.h"
#include "lockstep/base/words.h"

namespace lockstep::launch {
namespace {

/// Process numbers, ports and times differ between two failures that are the same.
std::string without_digits(std::string text) {
  std::erase_if(text, [](unsigned char c) { return std::isdigit(c) != 0; });
  return text;
}

std::string early_failure_of(const AttemptEnd& end) {
  if (!end.before_first_step || end.said.empty()) return {};
  return std::to_string(end.exit_code) + " " + without_digits(end.said);
}

/// Empty: another attempt may succeed.
std::string why_not_again(const Attempts& before, const AttemptEnd& end) {
  if (!end.executed) return "not started again: the program cannot be executed";
  if (end.exit_code == kExitUsage)
    return "not started again: exit code 2 tells of wrong arguments or settings";
  const auto early = early_failure_of(end);
  if (!early.empty() && early == before.early_failure)
    return "not started again: it failed in the same way twice before its first step";
  return {};
}

std::string hint_of(const Attempts& before, const AttemptEnd& end) {
  if (before.max_restarts == 0) return {};
  const auto why = why_not_again(before, end);
  if (!why.empty()) return why;
  return "not started again: " + counted(before.max_restarts, "restart") + " of " +
         std::to_string(before.max_restarts) + " used";
}

}  // namespace

bool may_help(const AttemptEnd& end) {
  return why_not_again({}, end).empty();
}

Decision decide(Attempts attempts, const AttemptEnd& end) {
  if (end.succeeded) return {Verdict::done, std::move(attempts)};
  const bool can = attempts.current() < attempts.max_restarts;
  const bool again = can && why_not_again(attempts, end).empty();
  Decision decision{again ? Verdict::restart : Verdict::give_up, attempts, {}};
  if (again && end.signal != 0) decision.verdict = Verdict::interrupted;
  if (!again) decision.hint = hint_of(attempts, end);
  decision.attempts.failures.push_back(end.line);
  decision.attempts.early_failure = early_failure_of(end);
  return decision;
}

}  // namespace lockstep::launch
