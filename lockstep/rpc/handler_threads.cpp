#include "lockstep/rpc/handler_threads.h"

#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <thread>

namespace lockstep::rpc::detail {
namespace {

/// So long a thread waits for another task.
constexpr std::chrono::seconds kIdle{5};
/// When no task has been taken for so long, all threads count as waiting for something.
constexpr std::chrono::milliseconds kStall{10};
/// The destructor's limit.
constexpr std::chrono::seconds kLastWait{10};

using Clock = std::chrono::steady_clock;
using Threads = std::list<std::thread>;

void join_all(Threads& threads) {
  for (auto& thread : threads) thread.join();
}

}  // namespace

struct HandlerThreads::Core : std::enable_shared_from_this<Core> {
  explicit Core(size_t may_be_busy) : busy(may_be_busy) {}

  void add_if_needed(bool stalled);
  void use_thread();
  void watch_if_needed();
  void watch();
  void work(Threads::iterator self);
  /// Empty: the thread is to end.
  std::function<void()> next(Threads::iterator self);

  const size_t busy;
  std::mutex mutex;
  std::condition_variable changed, watched;
  std::deque<std::function<void()>> tasks;
  std::multimap<Clock::time_point, std::function<void()>> later;
  Threads threads, ended;
  std::thread watch_thread;  ///< Looks whether tasks wait for long, and whose time has come.
  size_t free = 0, waiting = 0;
  int64_t taken = 0;
  bool ends = false;
};

thread_local HandlerThreads::Core* HandlerThreads::core_of_this_thread = nullptr;
thread_local bool HandlerThreads::is_handler = false;

HandlerThreads::HandlerThreads(int busy)
    : core_(std::make_shared<Core>(static_cast<size_t>(busy))) {}

HandlerThreads::~HandlerThreads() {
  end(kLastWait);
}

bool HandlerThreads::end(std::chrono::milliseconds limit) noexcept {
  Threads all;
  // Their ends may do anything, so without the lock.
  decltype(core_->tasks) dropped;
  decltype(core_->later) dropped_later;
  bool ended = false;
  std::thread watch;
  {
    std::unique_lock lock(core_->mutex);
    core_->ends = true;
    dropped.swap(core_->tasks);
    dropped_later.swap(core_->later);
    core_->changed.notify_all();
    core_->watched.notify_all();
    // Each thread moves itself to the ended ones.
    ended = core_->changed.wait_for(lock, limit, [&] { return core_->threads.empty(); });
    for (auto& thread : core_->threads) {
      if (thread.joinable()) thread.detach();
    }
    all.swap(core_->ended);
    watch.swap(core_->watch_thread);
  }
  join_all(all);
  if (watch.joinable()) watch.join();
  return ended;
}

void HandlerThreads::run(std::function<void()> task) {
  Threads ended;
  {
    const std::lock_guard lock(core_->mutex);
    if (core_->ends) return;
    ended.swap(core_->ended);
    core_->tasks.push_back(std::move(task));
    core_->use_thread();
    core_->watch_if_needed();
  }
  join_all(ended);
}

void HandlerThreads::run_later(std::chrono::milliseconds delay, std::function<void()> task) {
  const std::lock_guard lock(core_->mutex);
  if (core_->ends) return;
  core_->later.emplace(Clock::now() + delay, std::move(task));
  core_->watch_if_needed();
}

// With the lock, for the task that is the last now.
void HandlerThreads::Core::use_thread() {
  if (free < tasks.size()) return add_if_needed(false);
  changed.notify_one();
}

// With the lock.
void HandlerThreads::Core::add_if_needed(bool stalled) {
  if (ends || tasks.size() <= free) return;
  if (!stalled && threads.size() - waiting >= busy) return;
  // The thread takes its first task once it gets the lock, and so finds its own handle.
  const auto self = threads.emplace(threads.end());
  *self = std::thread([core = shared_from_this(), self] { core->work(self); });
}

// With the lock.
void HandlerThreads::Core::watch_if_needed() {
  if (tasks.size() <= free && later.empty()) return;
  if (!watch_thread.joinable())
    watch_thread = std::thread([core = shared_from_this()] { core->watch(); });
  watched.notify_one();
}

size_t HandlerThreads::size() const {
  const std::lock_guard lock(core_->mutex);
  return core_->threads.size();
}

std::function<void()> HandlerThreads::Core::next(Threads::iterator self_thread) {
  std::unique_lock lock(mutex);
  ++free;
  changed.wait_for(lock, kIdle, [&] { return ends || !tasks.empty(); });
  --free;
  if (tasks.empty()) {
    // One that was left behind has been detached, so nobody joins it.
    if (self_thread->joinable()) {
      ended.splice(ended.end(), threads, self_thread);
    } else {
      threads.erase(self_thread);
    }
    if (ends) changed.notify_all();
    return {};
  }
  ++taken;
  auto task = std::move(tasks.front());
  tasks.pop_front();
  return task;
}

void HandlerThreads::Core::work(Threads::iterator self_thread) {
  core_of_this_thread = this;
  while (auto task = next(self_thread)) task();
}

void HandlerThreads::Core::watch() {
  std::unique_lock lock(mutex);
  while (!ends) {
    while (!later.empty() && later.begin()->first <= Clock::now()) {
      tasks.push_back(std::move(later.extract(later.begin()).mapped()));
      use_thread();
    }
    if (!tasks.empty()) {  // Another one whose time comes would wait as well.
      const int64_t before = taken;
      watched.wait_for(lock, kStall, [&] { return ends; });
      if (taken == before) add_if_needed(true);
    } else if (later.empty()) {
      watched.wait(lock);
    } else {
      const auto when = later.begin()->first;
      watched.wait_until(lock, when);
    }
  }
}

HandlerThreads::Waiting::Waiting() : core_(core_of_this_thread) {
  if (!core_) return;
  const std::lock_guard lock(core_->mutex);
  ++core_->waiting;
  core_->add_if_needed(false);
}

HandlerThreads::Waiting::~Waiting() {
  if (!core_) return;
  const std::lock_guard lock(core_->mutex);
  --core_->waiting;
}

}  // namespace lockstep::rpc::detail
