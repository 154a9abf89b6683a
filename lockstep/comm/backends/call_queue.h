#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "lockstep/comm/backends/tensor_work.h"

namespace lockstep::backends {

/// Runs a group's calls one after the other, in the order in which they are submitted. A call runs
/// in the caller's thread when none is ahead. Else it runs in a thread of the queue's own, which
/// starts when it is first needed.
///
/// A future's callbacks run in the thread that ended the call. They may wait for other calls of the
/// queue: while they run, another thread of it goes on. So callbacks of two calls may run at once,
/// as over Gloo.
class CallQueue {
 public:
  using WorkPtr = c10::intrusive_ptr<TensorWork>;

  CallQueue() = default;
  /// Closes. Waits for the threads, so it must not run in a callback of this queue's calls.
  ~CallQueue() {
    close();
    end_threads();
  }

  /// What becomes of the call is left in the work. Returns when it has ended, or at once where the
  /// request is asynchronous.
  void submit(const WorkPtr& work);
  /// Runs the callbacks of a work that has ended elsewhere, in a thread of the queue's. Any time.
  void call_back(const WorkPtr& work);
  /// Waits for what was submitted and ends the threads. Later calls fail. In one of these threads,
  /// from a callback, it does not wait for them: the next `close` does, or the destructor.
  /// Callbacks of two groups must not close each other's.
  void close();

 private:
  /// Unlocks while the call runs. False when it has not ended.
  bool run_here(const WorkPtr& work, std::unique_lock<std::mutex>& lock);
  /// Runs the first that waits, and its callbacks. Unlocks meanwhile.
  void run_first(std::unique_lock<std::mutex>& lock);
  void run_callbacks(const WorkPtr& work, std::unique_lock<std::mutex>& lock);
  void run();
  /// Under the lock: a thread of ours will get to what waits.
  void expect_thread();
  /// When the queue is closed.
  void end_threads();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<WorkPtr> waiting_;
  std::deque<WorkPtr> to_call_back_;
  bool busy_ = false;  ///< Some thread runs a call.
  bool closed_ = false;
  std::vector<std::thread> threads_;
  size_t living_ = 0;   ///< Those of them that have not ended.
  size_t at_hand_ = 0;  ///< Those of them that run no callbacks.
};

}  // namespace lockstep::backends
