#pragma once

#include <atomic>

#include "lockstep/comm/backends/call_queue.h"
#include "lockstep/comm/shared_memory/messages.h"

namespace lockstep::shm {

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
