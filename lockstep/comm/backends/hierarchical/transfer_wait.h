#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/comm/backends/hierarchical/first_failure.h"

namespace lockstep::hierarchical {

/// Waits for works that take only a wait without end. Gloo closes its connections when a send or a
/// receive runs into a time-out of its own. A thread looks after the wait instead: at its deadline,
/// and when the group's first failure is heard, it makes the work give up waiting. It sleeps while
/// nobody waits.
class TransferWait {
 public:
  using Clock = std::chrono::steady_clock;
  enum class End { done, failed_elsewhere, late };

  explicit TransferWait(FirstFailure& first_failure) : first_failure_(first_failure) {}
  ~TransferWait();

  /// Throws what the work throws. One thread at a time.
  End wait(c10d::Work& work, Clock::time_point deadline);
  /// The same for works whose waits may end early without harm. Needs no thread.
  End poll(c10d::Work& work, Clock::time_point deadline);
  /// Ends the present wait and every later one as failed elsewhere. Any thread.
  void interrupt();

 private:
  void run();
  /// Unlocks while it asks the store.
  void look(std::unique_lock<std::mutex>& lock);

  FirstFailure& first_failure_;
  std::mutex mutex_;
  std::condition_variable changed_;
  c10d::Work* current_ = nullptr;
  uint64_t number_ = 0;  ///< Of the present wait.
  Clock::time_point since_, deadline_, last_;
  End end_ = End::done;
  bool asleep_ = false;
  bool interrupted_ = false;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace lockstep::hierarchical
