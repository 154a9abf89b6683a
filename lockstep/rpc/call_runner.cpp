#include "lockstep/rpc/call_runner.h"

#include <c10/util/ScopeExit.h>

#include <map>
#include <shared_mutex>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/hash.h"
#include "lockstep/base/words.h"
#include "lockstep/rpc/handler_threads.h"
#include "lockstep/rpc/remote_failure.h"

namespace lockstep::rpc::detail {
namespace {

struct Registered {
  Signature signature;
  Handler handler;
};

/// The process's functions. They register themselves before main, so this belongs to the process.
struct Registry {
  std::shared_mutex mutex;
  std::map<std::string, Registered, std::less<>> functions;
};

Registry& registry() {
  static auto* const instance = new Registry;  // Threads may outlive static objects.
  return *instance;
}

/// What it gives lives as long as the process.
const Registered& registered(const std::string& name) {
  Registry& all = registry();
  const std::shared_lock lock(all.mutex);
  const auto found = all.functions.find(name);
  if (found != all.functions.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& [known, entry] : all.functions) names.push_back(known);
  throw UsageError("rpc: no function '" + name + "' is registered on the worker",
                   did_you_mean(name, names));
}

}  // namespace

Signature make_signature(std::string name, std::string types) {
  if (name.empty()) throw UsageError("rpc: a function's name is empty");
  const int64_t hash = fnv1a(types);
  return {std::move(name), std::move(types), hash};
}

void register_function(const Signature& signature, Handler handler) {
  Registry& all = registry();
  const std::unique_lock lock(all.mutex);
  const auto [place, added] =
      all.functions.try_emplace(signature.name, Registered{signature, std::move(handler)});
  if (!added) {
    throw UsageError("rpc: the function '" + signature.name + "' is registered twice: " +
                     place->second.signature.types + " and " + signature.types);
  }
}

std::vector<std::string> CallRunner::running() const {
  std::set<std::string> sorted;
  const std::lock_guard lock(mutex_);
  for (const auto* name : running_) sorted.insert(*name);
  return {sorted.begin(), sorted.end()};
}

std::vector<at::IValue> packed_call(const Signature& function, std::vector<at::IValue> arguments) {
  std::vector<at::IValue> call{function.name, function.hash};
  call.insert(call.end(), std::make_move_iterator(arguments.begin()),
              std::make_move_iterator(arguments.end()));
  return call;
}

std::optional<CallOutcome> CallRunner::run(std::vector<at::IValue> call, Done done) const {
  std::string name = "?";
  try {
    if (call.size() < 2 || !call[0].isString() || !call[1].isInt())
      throw DataError("rpc: a call came that is none of ours");
    name = call[0].toStringRef();
    const HandlerThreads::HandlerScope scope;
    const Registered& function = registered(name);
    if (function.signature.hash != call[1].toInt()) {
      return CallOutcome{{}, encode_mismatch(name, worker_, function.signature.types)};
    }
    std::unique_lock lock(mutex_);
    const auto place = running_.insert(&function.signature.name);
    lock.unlock();
    const auto ended = c10::make_scope_exit([&] {
      lock.lock();
      running_.erase(place);
      lock.unlock();
    });
    call.erase(call.begin(), call.begin() + 2);
    HandlerResult result = function.handler(call);
    if (!result.later) return CallOutcome{std::move(result.value), std::nullopt};
    result.later->when_done([worker = worker_, name, done = std::move(done),
                             state = std::weak_ptr(result.later)]() mutable {
      CallOutcome outcome;
      try {
        outcome.value = state.lock()->value({});
      } catch (...) {
        outcome.failure = encode_failure(std::current_exception(), worker, name);
      }
      done(std::move(outcome));
    });
    return std::nullopt;
  } catch (...) {
    return refused(std::current_exception(), name);
  }
}

CallOutcome CallRunner::refused(const std::exception_ptr& error,
                                const std::string& function) const {
  return {{}, encode_failure(error, worker_, function)};
}

}  // namespace lockstep::rpc::detail
