// Calls of others by the fast path: which handler thread runs them, and how they are answered.
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/fast_path.h"
#include "lockstep/rpc/rpc_worker.h"

namespace lockstep::rpc {

/// Any value.
template <>
struct Value<at::IValue> {
  static std::string type() { return "any"; }
  static at::IValue to(at::IValue value) { return value; }
  static at::IValue from(const at::IValue& sent) { return sent; }
};

namespace detail {
namespace {

/// Called by a worker whose answer does not fit into a message.
const auto delivery = function(
    "lockstep.rpc.deliver", [](int from, int64_t number, bool failed, const at::IValue& answer) {
      FastPath* const path = this_worker("rpc: an answer is delivered")->fast_path();
      if (!path) throw UsageError("rpc: no call of this worker went the fast way");
      CallOutcome outcome;
      if (failed) outcome.failure = Value<std::string>::from(answer);
      if (!failed) outcome.value = answer;
      path->on_delivery(from, static_cast<uint64_t>(number), outcome);
    });

/// A handler without a request sleeps until it is woken; this only bounds a system call.
constexpr std::chrono::hours kHandlerSleep{1};

}  // namespace

// Runs requests as long as there are any, then waits for more if no other thread does. On a handler
// thread.
void FastPath::serve() {
  {
    Look look(*link_);
    while (!stopped_) {
      auto request = requests_.pop();
      if (!request) {
        if (has_handler_.exchange(true)) break;
        request = wait_as_handler(look);
        has_handler_ = false;
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

std::optional<FastMessage> FastPath::wait_as_handler(Look& look) {
  const HandlerThreads::Waiting waiting;
  const auto ready = [this] { return stopped_ || !requests_.empty(); };
  const auto begin = Clock::now();
  while (true) {
    look.begin();
    look_for(Clock::now() + link_->spin(handler_budget_), ready, /*is_handler=*/true);
    if (stopped_) return std::nullopt;
    if (auto request = requests_.pop()) {
      handler_budget_.learn(Clock::now() - begin);
      return request;
    }
    look.end();
    if (link_->look()) {
      take(/*is_handler=*/true);
    } else {
      link_->sleep(FastLink::handler, ready, kHandlerSleep);
    }
  }
}

void FastPath::run(const FastMessage& request, Look& look) {
  const int caller = request.from;
  const uint64_t number = request.head.number;
  std::optional<CallOutcome> outcome;
  try {
    outcome = runner_->run(decode_values(request.bytes, kLimits.depth),
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
  std::string bytes = outcome.failure.value_or("");
  const bool fits = outcome.failure || encode_values({outcome.value}, kLimits, bytes);
  const Kind kind = outcome.failure ? Kind::failure : Kind::value;
  if (fits && link_->send(caller, {static_cast<uint32_t>(kind), number}, bytes)) return;
  deliver(caller, number, outcome);
}

// LibTorch's way takes all that can travel. That a value cannot is the call's failure. One that
// cannot be told either has no receiver any more.
void FastPath::deliver(int caller, uint64_t number, const CallOutcome& outcome) {
  const auto fail = [weak = weak_from_this(), caller, number,
                     told = outcome.failure.has_value()](const std::exception_ptr& error) {
    const auto self = weak.lock();
    if (self && !told) self->answer(caller, number, self->runner_->refused(error));
  };
  try {
    const auto delivered =
        send_call_to(caller, delivery.signature(),
                     {link_->rank(), static_cast<int64_t>(number), outcome.failure.has_value(),
                      outcome.failure ? at::IValue(*outcome.failure) : outcome.value},
                     default_timeout());
    delivered->when_done([fail, state = std::weak_ptr(delivered)] {
      try {
        state.lock()->value({});
      } catch (...) {
        fail(std::current_exception());
      }
    });
  } catch (...) {
    fail(std::current_exception());
  }
}

}  // namespace detail
}  // namespace lockstep::rpc
