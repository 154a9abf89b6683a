#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <utility>

namespace lockstep::rpc::detail {

/// Threads that run handlers. `busy` of them may compute at a time. One that waits for another
/// worker lets a further thread take its place, and one that waits for something unknown does so as
/// well, a little later. So no nesting of calls locks up, and many short calls do not start many
/// threads. Threads that have had nothing to do for a while end.
class HandlerThreads {
 public:
  explicit HandlerThreads(int busy);
  /// Ends, if nobody has ended it, with a limit of ten seconds. Does not throw.
  ~HandlerThreads();
  HandlerThreads(const HandlerThreads&) = delete;
  HandlerThreads& operator=(const HandlerThreads&) = delete;

  /// Any thread. The task must not throw. The machine must be able to start a thread.
  void run(std::function<void()> task);
  /// The same after a while.
  void run_later(std::chrono::milliseconds delay, std::function<void()> task);
  /// Drops the tasks that have not begun and waits for those that run. False when one still runs
  /// after the limit: its thread is left behind, as no thread can be ended from outside. What the
  /// task uses must then live as long as the process. Nothing is run after this.
  bool end(std::chrono::milliseconds limit) noexcept;
  size_t size() const;
  /// Whether a handler runs on this thread.
  static bool on_one() { return is_handler; }

  /// A handler runs on this thread, of whomever it is, as long as this lives.
  class HandlerScope {
   public:
    HandlerScope() : before_(std::exchange(is_handler, true)) {}
    ~HandlerScope() { is_handler = before_; }
    HandlerScope(const HandlerScope&) = delete;
    HandlerScope& operator=(const HandlerScope&) = delete;

   private:
    const bool before_;
  };

 private:
  struct Core;

 public:
  /// This thread waits for another worker as long as it lives. Nothing on other threads than these.
  class Waiting {
   public:
    Waiting();
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    Core* const core_;
  };

 private:
  static thread_local Core* core_of_this_thread;
  static thread_local bool is_handler;

  const std::shared_ptr<Core> core_;  ///< Each thread holds it as well.
};

}  // namespace lockstep::rpc::detail
