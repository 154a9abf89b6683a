#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <deque>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/base/error.h"
#include "lockstep/comm/checks/call_signature.h"

namespace lockstep::gloo {

/// A rank's messages to itself, for which Gloo has no connection. A send copies its tensor and is
/// done. A receive of another dtype or size than its send fails with a MismatchError. Any thread
/// may call.
class OwnMessages {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  explicit OwnMessages(int rank) : rank_(rank) {}

  WorkPtr send(const at::Tensor& tensor, int tag) {
    const at::AutoDispatchBelowADInplaceOrView outside_autograd;
    const auto work = c10::make_intrusive<Message>(rank_, c10d::OpType::SEND, tensor.clone());
    work->end(nullptr);
    const std::lock_guard lock(mutex_);
    auto& receives = receives_[tag];
    std::erase_if(receives, [](const auto& receive) { return receive->isCompleted(); });
    if (receives.empty()) {
      sends_[tag].push_back(work->tensor);
    } else {
      deliver(work->tensor, *receives.front());
      receives.pop_front();
    }
    return work;
  }
  WorkPtr recv(const at::Tensor& tensor, int tag) {
    const auto work = c10::make_intrusive<Message>(rank_, c10d::OpType::RECV, tensor);
    const std::lock_guard lock(mutex_);
    auto& sends = sends_[tag];
    if (sends.empty()) {
      receives_[tag].push_back(work);
    } else {
      deliver(sends.front(), *work);
      sends.pop_front();
    }
    return work;
  }
  /// Whether a send of this tag waits for its receive.
  bool has_sent(int tag) {
    const std::lock_guard lock(mutex_);
    return !sends_[tag].empty();
  }

 private:
  struct Message final : c10d::Work {
    Message(int rank, c10d::OpType type, at::Tensor tensor)
        : c10d::Work(rank, type), tensor(std::move(tensor)) {}
    int sourceRank() const override { return rank_; }
    std::vector<at::Tensor> result() override { return {tensor}; }
    void abort() override {
      end(std::make_exception_ptr(CommError("a message to oneself was given up")));
    }
    bool wait(std::chrono::milliseconds timeout) override {
      try {
        return c10d::Work::wait(timeout);
      } catch (...) {  // Nothing is received any more.
        end(std::current_exception());
        throw;
      }
    }
    void end(const std::exception_ptr& error) {
      if (!isCompleted()) finish(error);
    }
    const at::Tensor tensor;
  };

  static void deliver(const at::Tensor& from, Message& receive) {
    const at::Tensor& to = receive.tensor;
    if (from.scalar_type() != to.scalar_type() || from.numel() != to.numel())
      return receive.end(std::make_exception_ptr(
          MismatchError("a receive from oneself of " + describe(signature_of(to)) +
                        " has met a send of " + describe(signature_of(from)))));
    const at::AutoDispatchBelowADInplaceOrView outside_autograd;
    to.copy_(from.view_as(to));
    receive.end(nullptr);
  }

  const int rank_;
  std::mutex mutex_;
  std::map<int, std::deque<at::Tensor>> sends_;  ///< By tag; what has not met its counterpart.
  std::map<int, std::deque<c10::intrusive_ptr<Message>>> receives_;  ///< Likewise.
};

}  // namespace lockstep::gloo
