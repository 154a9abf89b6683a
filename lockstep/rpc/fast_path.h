#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/comm/shared_memory/spin_budget.h"
#include "lockstep/rpc/call_runner.h"
#include "lockstep/rpc/fast_link.h"
#include "lockstep/rpc/function.h"
#include "lockstep/rpc/future.h"
#include "lockstep/rpc/handler_threads.h"
#include "lockstep/rpc/value_codec.h"

namespace lockstep::rpc::detail {

/// Requests that wait for a thread. Any thread.
class RequestQueue {
 public:
  void push(FastMessage request) {
    const std::lock_guard lock(mutex_);
    requests_.push_back(std::move(request));
    size_.store(requests_.size(), std::memory_order_seq_cst);
  }
  std::optional<FastMessage> pop() {
    if (empty()) return std::nullopt;
    const std::lock_guard lock(mutex_);
    if (requests_.empty()) return std::nullopt;
    std::optional<FastMessage> first(std::move(requests_.front()));
    requests_.pop_front();
    size_.store(requests_.size(), std::memory_order_seq_cst);
    return first;
  }
  bool empty() const { return size_.load(std::memory_order_seq_cst) == 0; }

 private:
  std::mutex mutex_;
  std::deque<FastMessage> requests_;
  std::atomic<size_t> size_{0};
};

/// Calls between ranks by a way of their own: plain values in messages of our own form over shared
/// memory or TCP (FastLink). LibTorch's way costs a call several changes of threads. Here
/// a small one that nothing disturbs has none. What does not fit goes LibTorch's way and means the
/// same.
///
/// **Three kinds of threads take messages out.** All of them finish calls whose answers have come.
/// Requests go into a queue.
/// - *Callers*: a thread that waits for a call looks for a while, then sleeps.
/// - *The polling handler*: a handler thread that has just run a function looks for the next
///   request, and runs it itself. While it runs one, the next handler thread with nothing to do
///   polls.
/// - *The poller*: a thread of this object that sleeps, and is woken when nobody else is at hand.
///   So no function keeps messages back, however long it runs. It also ends calls whose time is up.
///
/// Callbacks of calls run on handler threads, as each of the three may hold others up.
///
/// While requests wait, one further handler thread after another comes, by HandlerThreads' rules.
/// So short ones wake few threads, and long ones run side by side.
///
/// A result that does not fit into a message is brought to the caller LibTorch's way. Any thread.
class FastPath final : public std::enable_shared_from_this<FastPath> {
 public:
  /// Of a message.
  enum class Kind : uint32_t { request, value, failure };
  /// Reading values within values takes stack.
  static constexpr MessageLimits kLimits{FastLink::kMostBytes, 128};
  FastPath(std::shared_ptr<FastLink> link, std::shared_ptr<const CallRunner> runner,
           std::shared_ptr<HandlerThreads> threads);
  ~FastPath();

  /// Begins to serve.
  void start();
  /// Calls a function of another worker. Null when the call must go LibTorch's way: the worker is
  /// no rank or is lost, the arguments are not plain or too large, or too much waits for room.
  /// `what`: for errors, "rpc: 'add' on worker 'ps'".
  std::shared_ptr<CallState> call(int to, const Signature& signature,
                                  const std::vector<at::IValue>& arguments,
                                  std::chrono::milliseconds timeout, const std::string& what);
  /// Calls of this worker that have gone this way, or found no room.
  uint64_t calls_sent();
  FastLink& link() { return *link_; }
  /// An answer came LibTorch's way: a value, or the text of a failure. None waits for it where it
  /// is late, or `from` was not called.
  void on_delivery(int from, uint64_t number, const CallOutcome& outcome);
  /// The worker died or has left: the calls to it fail.
  void lose(int id);
  /// Fails all calls. From now on nothing is served or answered. Does not wait for functions.
  void stop() noexcept;

  // Called by a CallState whose thread can do the work itself, which saves a change of threads.
  /// Works until the state is done, until `end`, or as long as no other thread does. Then waits are
  /// to wait for that one.
  void drive(const CallState& state, std::optional<std::chrono::steady_clock::time_point> end);
  /// The state is done: a thread in `drive` may sleep over it.
  void finished(const CallState& state) noexcept;
  /// Runs a state's callbacks once: on another thread than the one that has finished it, which may
  /// be one that waits for another call, with locks of its own. `state` lives until then.
  void run_elsewhere(std::shared_ptr<CallState> state,
                     std::vector<std::function<void()>> callbacks) noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Pending {
    int to = 0;
    std::shared_ptr<CallState> state;
    Clock::time_point deadline;
    std::string what, types;
  };
  /// This thread looks for messages, so that others wake nobody. Whoever ends it takes out once
  /// more what has come.
  class Look {
   public:
    explicit Look(FastLink& link) : link_(link) {}
    ~Look() { end(); }
    Look(const Look&) = delete;
    Look& operator=(const Look&) = delete;

    void begin() {
      if (!std::exchange(on_, true)) link_.begin_look();
    }
    void end() {
      if (std::exchange(on_, false)) link_.end_look();
    }

   private:
    FastLink& link_;
    bool on_ = false;
  };

  // fast_calls.cpp: calls of this worker.
  std::optional<uint64_t> enter(Pending pending);
  std::optional<Pending> take_pending(uint64_t number, std::optional<int> from = std::nullopt);
  std::vector<Pending> take_pending_if(const std::function<bool(const Pending&)>& is_meant);
  void on_answer(const FastMessage& answer);
  static void fail(const Pending& call, const std::string& remote_failure);
  /// Nothing comes from that worker any more.
  void fail_calls_to(int id);
  /// Fails the calls whose time is up. Returns when that of the next one is.
  Clock::time_point expire();

  // fast_serve.cpp: calls of others.
  void serve();
  std::optional<FastMessage> wait_as_handler(Look& look);
  void run(const FastMessage& request, Look& look);
  void answer(int caller, uint64_t number, const CallOutcome& outcome);
  void deliver(int caller, uint64_t number, const CallOutcome& outcome);

  // fast_threads.cpp: which thread takes messages out when.
  void take(bool is_handler = false);
  /// What a thread does last that others may have relied on.
  void take_and_go();
  void bring_helper();
  void look_for(Clock::time_point end, const std::function<bool()>& enough, bool is_handler);
  void sleep_over(const CallState& state, Clock::time_point end);
  void run_poller();

  const std::shared_ptr<FastLink> link_;
  const std::shared_ptr<const CallRunner> runner_;
  const std::shared_ptr<HandlerThreads> threads_;
  std::atomic<bool> stopped_{false};

  std::mutex mutex_;
  std::unordered_map<uint64_t, Pending> pending_;
  uint64_t last_number_ = 0;
  Clock::time_point next_deadline_ = Clock::time_point::max();

  RequestQueue requests_;
  std::atomic<bool> has_handler_{false}, helper_comes_{false}, poller_called_{false};
  std::atomic<int> callers_looking_{0};
  std::atomic<const CallState*> sleeps_over_{nullptr};  ///< The caller that sleeps; null: none.
  shm::SpinBudget caller_budget_, handler_budget_;
  std::thread poller_;
};

}  // namespace lockstep::rpc::detail
