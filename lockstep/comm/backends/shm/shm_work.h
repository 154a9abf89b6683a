#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/call_queue.h"
#include "lockstep/comm/shared_memory/messages.h"
#include "lockstep/comm/shared_memory/plans.h"

namespace lockstep::shm {

/// One collective of this rank, and how it is done.
class ShmWork final : public backends::TensorWork {
 public:
  using TensorWork::TensorWork;

  uint64_t hash() const override;

  /// Several are done one after the other.
  void add(std::unique_ptr<Plan> plan);
  /// Once, when all have been added.
  void close();
  Plan& plan() { return *plan_; }
  /// Of the data, where all ranks must use the same part of the same memory.
  void set_region(RegionOffset region) { region_ = std::move(region); }
  bool begun = false;  ///< The others have been told.

 private:
  std::unique_ptr<Plan> plan_;
  std::vector<std::unique_ptr<Plan>> further_;
  RegionOffset region_;
};

/// The text for a send and a receive that met and do not fit.
std::string judge_messages(const Disagreement& disagreement, const backends::GroupNames& names);

/// A send or a receive of one tensor. Any thread may wait. The thread that waits does the work.
class ShmMessageWork final : public backends::TensorWork {
 public:
  using TensorWork::TensorWork;
  /// Once: posts the message. The future's callbacks run in a thread of `queue`, which must outlive
  /// `messages`.
  void begin(Messages& messages, backends::CallQueue& queue, int tag);

  bool isCompleted() override { return copied_ ? TensorWork::isCompleted() : message_->done(); }
  bool isSuccess() const override {
    return copied_ ? TensorWork::isSuccess() : message_->done() && !message_->error();
  }
  std::exception_ptr exception() const override {
    return copied_ ? TensorWork::exception() : message_->error();
  }
  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override { return message_->source(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void watch();

  backends::CallQueue* queue_ = nullptr;
  MessagePtr message_;
  bool copied_ = false;  ///< The caller's tensor gets its values when this work completes.
  std::atomic<bool> watched_{false};  ///< The message's end completes this work.
};

}  // namespace lockstep::shm
