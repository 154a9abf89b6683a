#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/checks/native_log.h"
#include "lockstep/rpc/call_runner.h"
#include "lockstep/rpc/fast_path.h"
#include "lockstep/rpc/handler_threads.h"
#include "lockstep/rpc/peers.h"
#include "lockstep/rpc/transport.h"

namespace lockstep::rpc::detail {

class GuardedAgent;
struct Guard;

/// This worker's calls that are under way. Any thread.
class CallCount {
 public:
  explicit CallCount(int64_t limit) : limit_(limit) {}

  /// A call begins. With `wait` not before fewer than the limit are under way; false when they
  /// still are after so long. Calls of handlers do not wait: those that they wait for may need
  /// them.
  [[nodiscard]] bool begin(std::optional<std::chrono::milliseconds> wait) {
    std::unique_lock lock(mutex_);
    if (wait && !changed_.wait_for(lock, *wait, [&] { return pending_ < limit_; })) return false;
    ++pending_;
    ++begun_;
    return true;
  }
  int64_t limit() const { return limit_; }
  void end() {
    const std::lock_guard lock(mutex_);
    --pending_;
    changed_.notify_all();
  }
  /// False when that took too long.
  bool wait_for_none(std::chrono::steady_clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline, [&] { return pending_ == 0; });
  }
  /// How many have ever begun.
  int64_t begun() const {
    const std::lock_guard lock(mutex_);
    return begun_;
  }
  int64_t pending() const {
    const std::lock_guard lock(mutex_);
    return pending_;
  }

 private:
  const int64_t limit_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t pending_ = 0, begun_ = 0;
};

/// This process as a worker. LibTorch keeps one agent, one table of references and one of autograd
/// contexts in a process, so there is one.
class Worker {
 public:
  /// Meets the others. Throws as `rpc::init` and `rpc::join`.
  static std::shared_ptr<Worker> start(const WorkerSetup& setup);
  /// Leaves at once, unless it has left already.
  ~Worker();

  const std::string& name() const { return name_; }
  const std::string& address() const { return address_; }
  int id() const { return id_; }
  /// Another worker has joined. False when it has this one's name.
  bool add_joined(int id, const std::string& name, const std::string& address);
  const std::shared_ptr<GuardedAgent>& agent() { return agent_; }
  Peers& peers() { return peers_; }
  CallCount& calls() { return calls_; }
  /// Null: there is none.
  FastPath* fast_path() { return fast_path_.get(); }
  HandlerThreads& threads() { return *threads_; }

  std::chrono::milliseconds timeout() const { return options_.timeout; }

  /// Waits for the others that live, and until no call is under way. Throws as Agent::shutdown.
  void leave_together();
  /// Logs what was left behind.
  void leave_now() noexcept;

 private:
  explicit Worker(const WorkerSetup& setup);

  /// Tells the others where this one is, and hears where they are.
  void meet(Store store);
  void greet_others();
  /// The same for a worker that joins those that are there.
  void join_others(Store store);
  [[noreturn]] void throw_unanswered() const;
  bool has_joined() const { return names_.empty(); }
  /// Returns what was left behind, as a sentence; empty: nothing.
  std::string leave() noexcept;
  /// Until no call is under way between workers.
  void wait_until_quiet(std::chrono::steady_clock::time_point deadline);

  /// TensorPipe logs each connection that a worker's death or leaving breaks; calls report it.
  const QuietNativeLog quiet_;
  const Options options_;
  const std::vector<std::string> names_;
  const std::string name_, address_;
  const int id_;
  const std::shared_ptr<Guard> guard_;
  CallCount calls_;
  // Shared, as a function that does not end must not lose them.
  const std::shared_ptr<HandlerThreads> threads_;
  const std::shared_ptr<const CallRunner> runner_;
  const std::shared_ptr<FastPath> fast_path_;
  Peers peers_;
  std::shared_ptr<GuardedAgent> agent_;
  bool left_ = false;
};

/// The process's worker. Throws UsageError, which says what was called, when there is none.
std::shared_ptr<Worker> this_worker(const char* what);

}  // namespace lockstep::rpc::detail
