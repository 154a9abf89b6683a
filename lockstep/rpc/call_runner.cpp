#include "lockstep/rpc/call_runner.h"

#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/rpc/function_registry.h"
#include "lockstep/rpc/handler_threads.h"
#include "lockstep/rpc/remote_failure.h"

namespace lockstep::rpc::detail {

CallRunner::CallRunner(std::string worker, RunningFunctions& running, const ServeLimits& limits)
    : worker_(std::move(worker)), running_(running), limits_(limits) {}

std::optional<CallOutcome> CallRunner::run(WireCall call, Done done) const {
  std::string name = std::move(call.name);
  try {
    Served served = begin(call);
    const HandlerThreads::HandlerScope scope(call.depth);
    const Registered& function = registered(name);
    if (function.signature.hash != call.types_hash) {
      return CallOutcome{{}, encode_mismatch(name, worker_, function.signature.types)};
    }
    const RunningFunctions::Scope runs(running_, function.signature.name);
    HandlerResult result = function.handler(call.arguments);
    if (!result.later) return CallOutcome{std::move(result.value), std::nullopt};
    result.later->when_done([worker = worker_, name, served = std::move(served),
                             done = std::move(done),
                             state = std::weak_ptr(result.later)]() mutable {
      CallOutcome outcome;
      try {
        outcome.value = state.lock()->value({});
      } catch (...) {
        outcome.failure = encode_failure(std::current_exception(), worker, name);
      }
      served.reset();
      done(std::move(outcome));
    });
    return std::nullopt;
  } catch (...) {
    return refused(std::current_exception(), name);
  }
}

CallRunner::Served CallRunner::begin(const WireCall& call) const {
  if (call.depth < 1 || call.depth > limits_.depth) {
    throw UsageError("rpc: a call within " + std::to_string(call.depth - 1) +
                         " others; expected fewer than " + std::to_string(limits_.depth),
                     "does a function call itself without end? Options::max_call_depth is the "
                     "limit");
  }
  if (served_->fetch_add(1) >= limits_.at_once) {
    served_->fetch_sub(1);
    throw CommError("rpc: the worker has " + std::to_string(limits_.at_once) +
                    " calls that are not answered yet (Options::max_served)");
  }
  return {served_.get(), [served = served_](void*) { served->fetch_sub(1); }};
}

CallOutcome CallRunner::refused(const std::exception_ptr& error,
                                const std::string& function) const {
  return {{}, encode_failure(error, worker_, function)};
}

}  // namespace lockstep::rpc::detail
