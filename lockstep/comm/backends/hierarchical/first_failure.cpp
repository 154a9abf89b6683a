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

/// Of what `tell` wrote.
Cause decode(const std::string& word) {
  return {word.at(0) == 'T', word.substr(1)};
}

// The add makes one rank the first on every kind of store. One that ends between its two requests
// leaves the others to what they know themselves.
Cause tell(CheckContext& context, const Cause& cause, const std::string& call) {
  const QuietNativeLog quiet;
  context.tell_failed(call + " " + cause.text, /*known=*/true);
  c10d::Store& store = context.store();
  if (store.add(kTold, 1) == 1) {
    store.set(kCause, (cause.timed_out ? "T" : "L") + cause.text);
    return cause;
  }
  const auto deadline = std::chrono::steady_clock::now() + kTell / 2;
  for (PollPause pause; !store.check({kCause}); pause.sleep())
    if (std::chrono::steady_clock::now() >= deadline) return cause;
  return decode(store.get_to_str(kCause));
}

}  // namespace

Cause FirstFailure::raise(const Cause& cause, const std::string& call) noexcept {
  const std::lock_guard lock(mutex_);
  if (known_) return *known_;
  const auto first = requests_.ask<Cause>(
      [cause, call](CheckContext& context) { return tell(context, cause, call); }, kTell);
  known_ = first.value_or(cause);
  return *known_;
}

std::optional<Cause> FirstFailure::heard() noexcept {
  const std::lock_guard lock(mutex_);
  if (known_) return known_;
  const auto word = requests_.ask<std::string>(
      [](CheckContext& context) {
        const QuietNativeLog quiet;
        c10d::Store& store = context.store();
        return store.check({kCause}) ? store.get_to_str(kCause) : std::string();
      },
      kLook);
  if (word && !word->empty()) known_ = decode(*word);
  return known_;
}

}  // namespace lockstep::hierarchical
