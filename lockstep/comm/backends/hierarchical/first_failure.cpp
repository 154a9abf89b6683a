#include "lockstep/comm/backends/hierarchical/first_failure.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/base/poll_pause.h"
#include "lockstep/comm/checks/native_log.h"

namespace lockstep::hierarchical {
namespace {

using std::chrono::milliseconds;

constexpr const char* kCause = "first_failure/cause";
constexpr const char* kTold = "first_failure/told";
/// The store answers within a millisecond or is lost.
constexpr milliseconds kLook{300}, kTell{2'000};

// The add makes one rank the first on every kind of store. One that ends between its two requests
// leaves the others to what they know themselves.
Failure tell(CheckContext& context, const Failure& cause, const std::string& call) {
  const QuietNativeLog quiet;
  if (!call.empty()) context.tell_failed(call + " " + describe(cause), /*known=*/true);
  c10d::Store& store = context.store();
  if (store.add(kTold, 1) == 1) {
    store.set(kCause, encode(cause));
    return cause;
  }
  const auto deadline = std::chrono::steady_clock::now() + kTell / 2;
  for (PollPause pause; !store.check({kCause}); pause.sleep())
    if (std::chrono::steady_clock::now() >= deadline) return cause;
  return decode_failure(store.get_to_str(kCause)).value_or(cause);
}

/// How a rank went that was told of and does not come to this call.
std::optional<Failure> gone_before(CheckContext& context, int64_t call) {
  if (call == 0 || !context.any_gone()) return std::nullopt;
  for (const int rank : context.others()) {
    const auto gone = context.gone(rank);
    if (gone && !gone->ranks.empty() && gone->ranks[0].calls < call) return gone;
  }
  return std::nullopt;
}

}  // namespace

Failure FirstFailure::raise(const Failure& cause, const std::string& call) noexcept {
  const std::lock_guard lock(mutex_);
  if (known_) return *known_;
  const auto first = requests_.ask<Failure>(
      [cause, call](CheckContext& context) { return tell(context, cause, call); }, kTell);
  known_ = first.value_or(cause);
  return *known_;
}

std::optional<Failure> FirstFailure::heard() noexcept {
  return ask(/*only_missed=*/false);
}

std::optional<Failure> FirstFailure::missed() noexcept {
  return ask(/*only_missed=*/true);
}

std::optional<Failure> FirstFailure::ask(bool only_missed) noexcept {
  const std::lock_guard lock(mutex_);
  if (known_) return known_;
  const auto answer = requests_.ask<std::optional<Failure>>(
      [call = call_.load(), only_missed](CheckContext& context) -> std::optional<Failure> {
        const QuietNativeLog quiet;
        c10d::Store& store = context.store();
        if (!only_missed && store.check({kCause})) return decode_failure(store.get_to_str(kCause));
        if (const auto gone = gone_before(context, call))
          return tell(context, *gone, "group '" + context.group() + "':");
        return std::nullopt;
      },
      kLook);
  if (answer && *answer) known_ = *answer;
  return known_;
}

void FirstFailure::tell_gone(int rank, const Failure& gone) noexcept {
  requests_.ask<bool>(
      [rank, gone](CheckContext& context) {
        context.tell_gone(rank, gone);
        return true;
      },
      kTell);
}

}  // namespace lockstep::hierarchical
