#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <thread>

namespace lockstep::rpc::detail {

/// Threads that run handlers. There are as many as handlers that wait for each other need: a task
/// that finds no free thread gets a new one. So no nesting of calls locks up. Threads that have had
/// nothing to do for a while end.
class HandlerThreads {
 public:
  HandlerThreads() = default;
  /// Waits for the tasks that are running and drops the others.
  ~HandlerThreads();
  HandlerThreads(const HandlerThreads&) = delete;
  HandlerThreads& operator=(const HandlerThreads&) = delete;

  /// Any thread. The task must not throw.
  void run(std::function<void()> task);
  size_t size() const;

 private:
  using Threads = std::list<std::thread>;
  void work(Threads::iterator self);
  /// Empty: the thread is to end.
  std::function<void()> next(Threads::iterator self);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  Threads threads_, ended_;
  size_t free_ = 0;
  bool ends_ = false;
};

}  // namespace lockstep::rpc::detail
