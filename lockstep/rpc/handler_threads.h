#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <thread>

namespace lockstep::rpc::detail {

/// Threads that run handlers. `busy` of them may compute at a time. One that waits for another
/// worker lets a further thread take its place, and one that waits for something unknown does so as
/// well, a little later. So no nesting of calls locks up, and many short calls do not start many
/// threads. Threads that have had nothing to do for a while end.
class HandlerThreads {
 public:
  explicit HandlerThreads(int busy) : busy_(static_cast<size_t>(busy)) {}
  /// Waits for the tasks that are running and drops the others.
  ~HandlerThreads();
  HandlerThreads(const HandlerThreads&) = delete;
  HandlerThreads& operator=(const HandlerThreads&) = delete;

  /// Any thread. The task must not throw.
  void run(std::function<void()> task);
  size_t size() const;
  /// Whether a handler runs on this thread.
  static bool on_one() { return handles; }

  /// A handler runs on this thread, of whomever it is, as long as this lives.
  class HandlerScope {
   public:
    HandlerScope() : before_(handles) { handles = true; }
    ~HandlerScope() { handles = before_; }
    HandlerScope(const HandlerScope&) = delete;
    HandlerScope& operator=(const HandlerScope&) = delete;

   private:
    const bool before_;
  };

  /// This thread waits for another worker as long as it lives. Nothing on other threads than these.
  class Waiting {
   public:
    Waiting();
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    HandlerThreads* const threads_;
  };

 private:
  using Threads = std::list<std::thread>;
  void add_if_needed(bool stalled);
  void work(Threads::iterator self);
  /// Empty: the thread is to end.
  std::function<void()> next(Threads::iterator self);
  void watch();

  static thread_local HandlerThreads* of_this_thread;
  static thread_local bool handles;

  const size_t busy_;
  mutable std::mutex mutex_;
  std::condition_variable changed_, watched_;
  std::deque<std::function<void()>> tasks_;
  Threads threads_, ended_;
  std::thread watch_;  ///< Looks whether tasks wait for long.
  size_t free_ = 0, waiting_ = 0;
  int64_t taken_ = 0;
  bool ends_ = false;
};

}  // namespace lockstep::rpc::detail
