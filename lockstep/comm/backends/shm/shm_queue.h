#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "lockstep/comm/backends/shm/shm_work.h"

namespace lockstep::shm {

/// Runs a group's collectives one after the other, in the order in which they are submitted: in the
/// calling thread where that is fastest, else in a thread that starts with the first need.
///
/// A call that need not be finished at once is begun by its caller, which then looks for the others
/// for as long as a hand-over to the thread would take. When they have all come, nothing that it
/// waits for depends on their programs any more, so finishing it in the caller cannot dead-lock,
/// whatever the order in which ranks call into several groups. Else the thread goes on with it.
class ShmQueue {
 public:
  struct Options {
    /// Calls that move more are left to the thread at once, where there is a core for it.
    size_t inline_bytes = SIZE_MAX;
  };
  ShmQueue(SharedGroup& group, Options options) : group_(group), options_(options) {}
  ~ShmQueue() { close(); }

  /// Returns at once or when the call is finished, with what becomes of it in the work; `blocking`:
  /// when it is finished.
  void submit(const c10::intrusive_ptr<ShmWork>& work, bool blocking);
  /// Waits for what is under way and ends the thread. Later calls fail.
  void close();

 private:
  bool run_here(const c10::intrusive_ptr<ShmWork>& work, bool blocking, std::exception_ptr& error);
  void run();
  /// Unlocks while it runs the first that waits.
  void run_first(std::unique_lock<std::mutex>& lock);

  SharedGroup& group_;
  const Options options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<ShmWork>> waiting_;
  bool busy_ = false;  ///< The thread is within a call.
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace lockstep::shm
