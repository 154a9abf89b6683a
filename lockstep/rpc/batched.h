#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/rpc/function.h"
#include "lockstep/rpc/future.h"

namespace lockstep::rpc {

struct BatchOptions {
  /// The most requests in a batch. The number of callers is a good choice: more never arrive
  /// together. Callers that stop while others go on leave batches short: each then takes `delay`.
  int64_t size = 16;
  /// The first request of a batch waits no longer than this for others. The default is several
  /// times the duration of a call, so that slower callers are included.
  std::chrono::milliseconds delay{10};
};

namespace detail {

/// Runs a task on one of the worker's handler threads after a while. When the worker leaves before,
/// the task is dropped.
void run_later(std::chrono::milliseconds delay, std::function<void()> task);

/// Throws UsageError for sizes and delays out of range.
void check_batch_options(const std::string& name, const BatchOptions& options);

/// Gathers requests until they are enough or late. Any thread.
template <class A, class R>
class Batcher : public std::enable_shared_from_this<Batcher<A, R>> {
 public:
  using Run = std::function<std::vector<R>(std::vector<A>)>;
  Batcher(Run run, const BatchOptions& options) : run_(std::move(run)), options_(options) {}

  Future<R> add(A request) {
    const Promise<R> promise;
    Batch full;
    bool first = false;
    int64_t number = 0;
    {
      const std::lock_guard lock(mutex_);
      first = batch_.requests.empty();
      number = number_;
      batch_.requests.push_back(std::move(request));
      batch_.promises.push_back(promise);
      if (static_cast<int64_t>(batch_.requests.size()) >= options_.size) full = take();
    }
    if (!full.requests.empty()) {
      answer(std::move(full));
    } else if (first) {
      run_later(options_.delay, [self = this->shared_from_this(), number] { self->late(number); });
    }
    return promise.future();
  }

 private:
  struct Batch {
    std::vector<A> requests;
    std::vector<Promise<R>> promises;
  };

  Batch take() {
    ++number_;
    return std::exchange(batch_, Batch());
  }

  void late(int64_t number) {
    Batch waiting;
    {
      const std::lock_guard lock(mutex_);
      if (number != number_) return;  // That batch was full in time.
      waiting = take();
    }
    answer(std::move(waiting));
  }

  void answer(Batch batch) const {
    try {
      const size_t size = batch.requests.size();
      std::vector<R> results = run_(std::move(batch.requests));
      if (results.size() != size) {
        throw UsageError("rpc: a batch of " + std::to_string(size) + " requests got " +
                         std::to_string(results.size()) + " results");
      }
      for (size_t i = 0; i < size; ++i) batch.promises[i].set_value(std::move(results[i]));
    } catch (...) {
      for (const auto& promise : batch.promises) promise.set_exception(std::current_exception());
    }
  }

  const Run run_;
  const BatchOptions options_;
  std::mutex mutex_;
  Batch batch_;
  int64_t number_ = 0;  ///< Of the batch that is being gathered.
};

/// `List`: std::vector<A>, by value or by const reference.
template <class R, class List>
auto add_batched(std::string name, std::function<std::vector<R>(List)> run,
                 const BatchOptions& options) {
  using A = std::remove_cvref_t<List>::value_type;
  check_batch_options(name, options);
  auto batcher = std::make_shared<Batcher<A, R>>(std::move(run), options);
  return function(std::move(name),
                  [batcher](A request) { return batcher->add(std::move(request)); });
}

}  // namespace detail

/// Registers a function of a list of requests, which gives their results in the same order. Callers
/// call it with one request each and get its result. Requests that arrive together are answered
/// together, which is faster where one large operation takes the place of many small ones:
///
///     const auto select_action = rpc::batched(
///         "select_action",
///         [](std::vector<at::Tensor> states) { return policy(at::stack(states)).unbind(); },
///         {.size = 8});
///
/// No thread waits while requests are gathered. Batches do not belong to the callers' autograd
/// contexts. An exception fails all requests of its batch. Several batches may run at once.
template <class F>
auto batched(std::string name, F function, const BatchOptions& options = {}) {
  return detail::add_batched(std::move(name), std::function(std::move(function)), options);
}

}  // namespace lockstep::rpc
