// Calls of others by the fast path: which handler thread runs them, and how they are answered.
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/rpc/fast_look.h"
#include "lockstep/rpc/fast_path.h"

namespace lockstep::rpc::detail {
namespace {

/// A guest without a request sleeps until it is woken; this only bounds a system call.
constexpr std::chrono::hours kGuestSleep{1};

}  // namespace

// Runs requests as long as there are any, then waits for more if no other thread does. On a handler
// thread.
void FastPath::serve() {
  {
    Look look(*link_);
    while (!stopped_) {
      auto request = requests_.pop();
      if (!request) {
        if (has_guest_.exchange(true)) break;
        request = wait_as_guest(look);
        has_guest_ = false;
        if (!request) break;
      }
      // Others take over before the function runs, as it may take long.
      look.end();
      take_and_go();
      bring_helper();
      run(*request, look);
    }
  }
  take_and_go();
  bring_helper();
}

std::optional<FastMessage> FastPath::wait_as_guest(Look& look) {
  const HandlerThreads::Waiting waiting;
  const auto ready = [this] { return stopped_ || !requests_.empty(); };
  const auto begin = Clock::now();
  while (true) {
    look.begin();
    look_for(Clock::now() + link_->spin(guest_budget_), ready, /*is_guest=*/true);
    if (stopped_) return std::nullopt;
    if (auto request = requests_.pop()) {
      guest_budget_.learn(Clock::now() - begin);
      return request;
    }
    look.end();
    if (link_->look()) {
      take(/*is_guest=*/true);
    } else {
      link_->sleep(FastLink::guest, ready, kGuestSleep);
    }
  }
}

void FastPath::run(const FastMessage& request, Look& look) {
  const int caller = request.from;
  const uint64_t number = request.head.number;
  std::optional<CallOutcome> outcome;
  try {
    PlainRequest plain = decode_request(request.bytes, limits_.depth);
    WireCall call(std::move(plain.function), static_cast<int64_t>(request.head.hash),
                  static_cast<int64_t>(request.head.extra), std::move(plain.arguments));
    outcome = runner_->run(std::move(call),
                           [weak = weak_from_this(), caller, number](const CallOutcome& late) {
                             if (const auto self = weak.lock()) self->answer(caller, number, late);
                           });
  } catch (...) {
    outcome = runner_->refused(std::current_exception());
  }
  if (!outcome) return;
  look.begin();  // First: the caller may have its next request ready at once.
  answer(caller, number, *outcome);
}

void FastPath::answer(int caller, uint64_t number, const CallOutcome& outcome) {
  if (stopped_) return;
  std::string bytes;
  FastHead head{0, number, 0, 0};
  Kind kind = Kind::value;
  if (outcome.failure) {
    const bool fits = outcome.failure->size() <= limits_.bytes;
    kind = fits ? Kind::failure : Kind::kept_failure;
    if (fits) bytes = *outcome.failure;
    if (!fits) head.extra = static_cast<uint64_t>(keep(caller, *outcome.failure));
  } else if (!encode_values({outcome.value}, limits_, bytes)) {
    kind = Kind::kept_value;
    bytes.clear();
    head.extra = static_cast<uint64_t>(keep(caller, outcome.value));
  }
  head.kind = static_cast<uint32_t>(kind);
  const bool sent = link_->send(caller, head, bytes, FastLink::WhenFull::keep);
  if (sent || head.extra == 0) return;
  const std::lock_guard lock(mutex_);
  kept_.erase(static_cast<int64_t>(head.extra));
}

int64_t FastPath::keep(int caller, at::IValue value) {
  const std::lock_guard lock(mutex_);
  kept_[++last_ticket_] = {caller, std::move(value)};
  return last_ticket_;
}

size_t FastPath::results_kept() {
  const std::lock_guard lock(mutex_);
  return kept_.size();
}

at::IValue FastPath::take_kept(int64_t ticket) {
  const std::lock_guard lock(mutex_);
  const auto found = kept_.find(ticket);
  if (found == kept_.end()) {
    throw DataError("rpc: no result is kept under the ticket " + std::to_string(ticket));
  }
  at::IValue value = std::move(found->second.value);
  kept_.erase(found);
  return value;
}

}  // namespace lockstep::rpc::detail
