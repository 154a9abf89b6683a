#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/comm/backends/shm/shm_work.h"
#include "lockstep/comm/shared_memory/messages.h"

namespace lockstep::shm {

/// What a send or a receive says of itself. It owns the memory that is sent or received into: the
/// message holds it until it is done, also when the program has dropped the work.
class MessageText : public Call {
 public:
  /// `peer`: of the group; -1: any.
  MessageText(Operation operation, const at::Tensor& tensor, int peer, int tag,
              std::shared_ptr<const GroupNames> names, at::Tensor memory);
  uint64_t hash() const override;
  std::string encoded() const override { return encode(signature_); }
  std::string text() const override;

 private:
  CallSignature signature_;
  int64_t elements_;
  int tag_;
  std::shared_ptr<const GroupNames> names_;
  at::Tensor memory_;
};

/// The text for a send and a receive that met and do not fit.
std::string judge_messages(const Disagreement& disagreement, const GroupNames& names);

/// A send or a receive of a tensor, which it holds until it is done. Any thread may wait.
class ShmMessageWork : public c10d::Work {
 public:
  ShmMessageWork(int rank, c10d::OpType type, at::Tensor tensor)
      : c10d::Work(rank, type), tensor_(std::move(tensor)), memory_(tensor_) {
    if (!tensor_.is_contiguous()) memory_ = tensor_.contiguous();
  }
  /// Contiguous; to be sent or received into.
  const at::Tensor& memory() const { return memory_; }
  /// Once, right after the message has been posted.
  void begin(MessagePtr message);

  bool isCompleted() override { return message_->done(); }
  bool isSuccess() const override { return message_->done() && !message_->error(); }
  std::exception_ptr exception() const override { return message_->error(); }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}
  void abort() override {}
  int sourceRank() const override { return message_->source(); }
  std::vector<at::Tensor> result() override { return {tensor_}; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void finished();

  at::Tensor tensor_;
  at::Tensor memory_;
  MessagePtr message_;
  bool watched_ = false;  ///< `finished` will be called, or has been.
  bool ended_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace lockstep::shm
