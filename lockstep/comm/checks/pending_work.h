#pragma once

#include <condition_variable>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/comm/checks/call_signature.h"
#include "lockstep/comm/checks/check_context.h"

namespace lockstep {

/// A send or receive that P2PGate holds back. It is over when it was failed, or when it was issued
/// and the backend's own work is over.
class PendingWork final : public c10d::Work {
 public:
  PendingWork(std::shared_ptr<CheckContext> context, const CallSummary& call, c10d::OpType type);

  /// One of them, once, by the gate.
  void issued(c10::intrusive_ptr<c10d::Work> inner, int peer);
  void failed(std::exception_ptr error);
  /// Aborted before it was issued: there is nothing to issue any more.
  bool given_up() const;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  uint64_t getSequencenumber() const override { return call_.sequence; }

 private:
  c10::intrusive_ptr<c10d::Work> inner() const;

  const std::shared_ptr<CheckContext> context_;
  const CallSummary call_;
  std::condition_variable settled_;
  c10::intrusive_ptr<c10d::Work> inner_;
  int peer_ = -1;
};

}  // namespace lockstep
