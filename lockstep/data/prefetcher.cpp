#include "lockstep/data/prefetcher.h"

#include <c10/util/ParallelGuard.h>
#include <pthread.h>

#include <csignal>
#include <utility>

namespace lockstep {

Prefetcher::Prefetcher(int workers, int64_t window, int64_t first, int64_t last, Make make)
    : make_(std::move(make)), last_(last), slots_(window), claimed_(first), taken_(first) {
  for (int worker = 0; worker < workers; ++worker)
    threads_.emplace_back([this, worker] { work(worker); });
}

Prefetcher::~Prefetcher() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  room_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

std::optional<int64_t> Prefetcher::claim() {
  std::unique_lock lock(mutex_);
  const auto window = static_cast<int64_t>(slots_.size());
  room_.wait(lock, [&] { return stopping_ || claimed_ >= last_ || claimed_ < taken_ + window; });
  if (stopping_ || claimed_ >= last_) return std::nullopt;
  return claimed_++;
}

void Prefetcher::work(int worker) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
  const c10::ParallelGuard one_thread(
      true);  // no team of threads for each worker's tensor operations
  while (const std::optional<int64_t> batch = claim()) {
    Slot made;
    try {
      made.batch = make_(worker, *batch);
    } catch (...) {
      made.error = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    slot(*batch) = std::move(made);
    ready_.notify_one();
  }
}

Batch Prefetcher::take() {
  std::unique_lock lock(mutex_);
  Slot& next = slot(taken_);
  ready_.wait(lock, [&] { return next.ready(); });
  Slot taken = std::exchange(next, Slot{});
  ++taken_;
  lock.unlock();
  room_.notify_one();
  if (taken.error) std::rethrow_exception(taken.error);
  return std::move(*taken.batch);
}

}  // namespace lockstep
