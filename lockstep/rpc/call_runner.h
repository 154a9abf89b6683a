#pragma once

#include <ATen/core/ivalue.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/rpc/wire_call.h"

namespace lockstep::rpc::detail {

struct ServeLimits {
  int64_t at_once = 65'536;  ///< Functions that are not answered yet.
  int64_t depth = 2'048;     ///< Of calls within calls.
};

/// What a call gave: the function's result, or its failure as a text (see failure.h).
struct CallOutcome {
  at::IValue value;
  std::optional<std::string> failure;
};

/// Runs registered functions for other workers, whichever way their calls came. Any thread.
class CallRunner {
 public:
  using Done = std::function<void(CallOutcome)>;

  CallRunner(std::string worker, const ServeLimits& limits)
      : worker_(std::move(worker)), limits_(limits) {}

  /// Runs the function on this thread. None when it has returned a Future: `done` is called with
  /// the outcome when that is done, perhaps at once. Does not throw.
  std::optional<CallOutcome> run(WireCall call, Done done) const;
  /// The outcome of a call that failed; by default before it named its function.
  CallOutcome refused(const std::exception_ptr& error, const std::string& function = "?") const;

  /// The functions that run now, for messages. Sorted, each once.
  std::vector<std::string> running() const;

 private:
  /// Counts a call until it is answered.
  using Served = std::shared_ptr<void>;
  Served begin(const WireCall& call) const;

  const std::string worker_;
  const ServeLimits limits_;
  mutable std::mutex mutex_;
  mutable std::multiset<const std::string*> running_;  ///< Names of functions.
  /// Answers may come when this is gone.
  const std::shared_ptr<std::atomic<int64_t>> served_ = std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace lockstep::rpc::detail
