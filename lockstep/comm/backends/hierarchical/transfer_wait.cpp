#include "lockstep/comm/backends/hierarchical/transfer_wait.h"

#include <algorithm>
#include <utility>

namespace lockstep::hierarchical {
namespace {

/// How long a wait goes on before the store is asked, and the pause between two looks.
constexpr std::chrono::milliseconds kLook{40};
/// Longer than any deadline. A wait without a time-out would be given the group's by Gloo.
constexpr std::chrono::hours kWithoutEnd{24 * 365};
/// Who wakes so much later than it meant to stood still, perhaps with its whole machine. That
/// counts for nobody's lateness: what came meanwhile is not read yet.
constexpr std::chrono::seconds kStandstill{1};
/// Waits that follow each other within this time need not wake the thread.
constexpr std::chrono::seconds kAwake{1};

}  // namespace

TransferWait::~TransferWait() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

TransferWait::End TransferWait::wait(c10d::Work& work, Clock::time_point deadline) {
  {
    const std::lock_guard lock(mutex_);
    if (interrupted_) return End::failed_elsewhere;
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    current_ = &work;
    ++number_;
    since_ = Clock::now();
    deadline_ = deadline;
    end_ = End::done;
    if (asleep_) changed_.notify_all();
  }
  std::exception_ptr error;
  bool finished = false;
  try {
    finished = work.wait(kWithoutEnd);
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  current_ = nullptr;
  last_ = Clock::now();
  if (finished) return End::done;
  if (end_ != End::done) return end_;
  if (error) std::rethrow_exception(error);
  return End::failed_elsewhere;
}

TransferWait::End TransferWait::poll(c10d::Work& work, Clock::time_point deadline) {
  for (auto last = Clock::now();;) {
    try {
      if (work.wait(kLook)) return End::done;
    } catch (const std::exception&) {
      if (work.isCompleted()) throw;
    }
    const auto now = Clock::now();
    if (now - last > kStandstill) deadline += now - last;
    last = now;
    if (now >= deadline) return End::late;
    const std::lock_guard lock(mutex_);
    if (interrupted_ || first_failure_.heard()) return End::failed_elsewhere;
  }
}

void TransferWait::interrupt() {
  const std::lock_guard lock(mutex_);
  interrupted_ = true;
  if (!current_) return;
  end_ = End::failed_elsewhere;
  current_->abort();
}

void TransferWait::run() {
  std::unique_lock lock(mutex_);
  auto last = Clock::now();
  while (!stop_) {
    if (!current_ && Clock::now() - last_ > kAwake) {
      asleep_ = true;
      changed_.wait(lock);
      asleep_ = false;
      continue;
    }
    const auto now = Clock::now();
    auto pause = std::chrono::duration_cast<Clock::duration>(kLook);
    if (current_) pause = std::clamp(deadline_ - now, Clock::duration(1'000'000), pause);
    changed_.wait_for(lock, pause);
    const auto woken = Clock::now();
    const auto gap = woken - std::max(std::exchange(last, woken), since_);
    if (stop_ || !current_) continue;
    if (gap > kStandstill) deadline_ += gap;
    look(lock);
  }
}

void TransferWait::look(std::unique_lock<std::mutex>& lock) {
  const auto now = Clock::now();
  End end = now >= deadline_ ? End::late : End::done;
  if (end == End::done && now - since_ >= kLook) {
    const uint64_t number = number_;
    lock.unlock();
    const bool failed_elsewhere = first_failure_.heard().has_value();
    lock.lock();
    if (!current_ || number_ != number) return;
    if (failed_elsewhere) end = End::failed_elsewhere;
  }
  if (end == End::done || end_ != End::done) return;
  end_ = end;
  // Under the lock: the waiting thread cannot let go of the work before.
  current_->abort();
}

}  // namespace lockstep::hierarchical
