#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "lockstep/comm/work.h"

namespace c10d {
class Work;
}

namespace lockstep::detail {

/// The threads that wait for operations whose backend tells of their end only to a waiting thread:
/// Gloo's sends and receives. There is one per pending operation for which a callback was asked.
/// The group joins them when it closes.
class WaiterPool {
 public:
  WaiterPool();
  ~WaiterPool();
  /// Runs `wait` on a thread of its own. `abort` makes it return early.
  void start(std::function<void()> wait, std::function<void()> abort);
  /// Aborts what is pending and joins.
  void close() noexcept;

 private:
  struct Waiter;
  std::mutex mutex_;
  bool closed_ = false;
  std::vector<std::unique_ptr<Waiter>> waiters_;
};

/// One operation. With a pool it is of the kind that WaiterPool is for. Then the first thread that
/// waits here does so for all: the backend takes one waiter only. A wait that the caller limits
/// leaves that to the pool.
class WorkState : public std::enable_shared_from_this<WorkState> {
 public:
  WorkState(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> outputs,
            std::vector<at::Tensor> kept_alive, std::shared_ptr<WaiterPool> pool = nullptr);
  ~WorkState();

  void wait(std::optional<std::chrono::milliseconds> timeout);
  bool is_completed();
  void then(std::function<void(std::exception_ptr)> callback);
  const std::vector<at::Tensor>& outputs() const { return outputs_; }

 private:
  void run_wait();
  [[noreturn]] void throw_short_wait(std::chrono::milliseconds timeout) const;
  void finish(std::exception_ptr error);
  void start_waiter();

  c10::intrusive_ptr<c10d::Work> work_;
  std::vector<at::Tensor> outputs_;
  std::vector<at::Tensor> kept_alive_;
  std::weak_ptr<WaiterPool> pool_;
  const bool needs_waiter_;

  std::mutex mutex_;
  std::condition_variable done_changed_;
  bool claimed_ = false;
  bool done_ = false;
  std::exception_ptr error_;
  std::vector<std::function<void(std::exception_ptr)>> callbacks_;
};

}  // namespace lockstep::detail
