#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "lockstep/data/loader.h"

namespace lockstep {

/// Threads that make batches [first, last) ahead of the thread that takes them, in order. At most
/// `window` batches are ready or in the making at a time. All signals are blocked in the threads,
/// so that they go to the program's own. LibTorch's operations run on the thread itself there. A
/// machine that cannot start a thread ends the program.
class Prefetcher {
 public:
  /// Makes batch number `batch`. Called from the thread `worker` in [0, workers).
  using Make = std::function<Batch(int worker, int64_t batch)>;

  Prefetcher(int workers, int64_t window, int64_t first, int64_t last, Make make);
  /// Lets each thread finish the batch that it is at, and joins.
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  /// The next batch. Waits until it is made. Throws what making it threw. Not to be called after
  /// the last one or after it threw.
  Batch take();

 private:
  struct Slot {
    std::optional<Batch> batch;
    std::exception_ptr error;
    bool ready() const { return batch.has_value() || error != nullptr; }
  };

  void work(int worker);
  /// The number of the next batch to make, as soon as there is room for it. None at the end.
  std::optional<int64_t> claim();
  Slot& slot(int64_t batch) { return slots_[batch % static_cast<int64_t>(slots_.size())]; }

  const Make make_;
  const int64_t last_;
  std::mutex mutex_;  ///< Guards all below but the threads.
  std::condition_variable room_;
  std::condition_variable ready_;
  std::vector<Slot> slots_;  ///< Batch b is in slot b % window.
  int64_t claimed_;          ///< Batches before it are made or in the making.
  int64_t taken_;            ///< Batches before it were taken.
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace lockstep
