#pragma once

#include <ATen/core/ivalue.h>

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/rpc/function.h"

namespace lockstep::rpc::detail {

/// A call as it travels: the function's name, the hash of its types, then the arguments.
std::vector<at::IValue> packed_call(const Signature& function, std::vector<at::IValue> arguments);

/// What a call gave: the function's result, or its failure as a text (see failure.h).
struct CallOutcome {
  at::IValue value;
  std::optional<std::string> failure;
};

/// Runs registered functions for other workers, whichever way their calls came. Any thread.
class CallRunner {
 public:
  using Done = std::function<void(CallOutcome)>;

  explicit CallRunner(std::string worker) : worker_(std::move(worker)) {}

  /// Runs the function that a packed call names on this thread. None when it has returned a Future:
  /// `done` is called with the outcome when that is done, perhaps at once. Does not throw.
  std::optional<CallOutcome> run(std::vector<at::IValue> call, Done done) const;
  /// The outcome of a call that failed; by default before it named its function.
  CallOutcome refused(const std::exception_ptr& error, const std::string& function = "?") const;

  /// The functions that run now, for messages. Sorted, each once.
  std::vector<std::string> running() const;

 private:
  const std::string worker_;
  mutable std::mutex mutex_;
  mutable std::multiset<const std::string*> running_;  ///< Names of functions.
};

}  // namespace lockstep::rpc::detail
