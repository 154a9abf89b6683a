#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "lockstep/comm/backends/hierarchical/hierarchy.h"
#include "lockstep/comm/backends/shm/shm_work.h"

namespace lockstep::hierarchical {

/// Runs a group's calls one after the other, in the order in which they are submitted: one that
/// blocks in its caller's thread when none is ahead of it, every other in a thread of its own that
/// starts with the first need.
class CallQueue {
 public:
  using WorkPtr = c10::intrusive_ptr<shm::ShmWork>;
  using Body = std::function<void(Hierarchy&)>;

  explicit CallQueue(Hierarchy& hierarchy) : hierarchy_(hierarchy) {}
  ~CallQueue() { close(); }

  /// What becomes of the call is left in the work. Returns at once, or, `blocking`, when it ended.
  void submit(const WorkPtr& work, Body body, bool blocking);
  /// Waits for what was submitted and ends the thread. Later calls fail.
  void close();

 private:
  struct Call {
    WorkPtr work;
    Body body;
  };
  void run();
  /// Unlocks while it runs the call.
  void run_call(const Call& call, std::unique_lock<std::mutex>& lock);

  Hierarchy& hierarchy_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Call> waiting_;
  bool busy_ = false;  ///< Some thread runs a call.
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace lockstep::hierarchical
