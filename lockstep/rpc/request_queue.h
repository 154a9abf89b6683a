#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "lockstep/rpc/fast_link.h"

namespace lockstep::rpc::detail {

/// Requests that wait for a thread. Any thread.
class RequestQueue {
 public:
  void push(FastMessage request) {
    const std::lock_guard lock(mutex_);
    requests_.push_back(std::move(request));
    size_.store(requests_.size(), std::memory_order_seq_cst);
  }
  std::optional<FastMessage> pop() {
    if (empty()) return std::nullopt;
    const std::lock_guard lock(mutex_);
    if (requests_.empty()) return std::nullopt;
    std::optional<FastMessage> first(std::move(requests_.front()));
    requests_.pop_front();
    size_.store(requests_.size(), std::memory_order_seq_cst);
    return first;
  }
  bool empty() const { return size_.load(std::memory_order_seq_cst) == 0; }

 private:
  std::mutex mutex_;
  std::deque<FastMessage> requests_;
  std::atomic<size_t> size_{0};
};

}  // namespace lockstep::rpc::detail
