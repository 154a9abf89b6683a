#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "lockstep/comm/checks/call_signature.h"
#include "lockstep/comm/shared_memory/plans.h"

namespace lockstep::shm {

/// What this rank called.
struct Request {
  Operation operation = Operation::barrier;
  int reduction = -1;  ///< c10d::ReduceOp::RedOpType; -1: none.
  int root = -1;
  std::vector<at::Tensor> inputs = {};
  std::vector<at::Tensor> outputs = {};  ///< Where they are others than the inputs.
  std::vector<int64_t> input_splits = {};
  std::vector<int64_t> output_splits = {};
  std::optional<Place> place = {};  ///< Of the input, where that matters.
};

/// What all works of a group say about themselves. Outlives them.
struct GroupNames {
  RankNames ranks;
  std::string group;
};

/// One collective of this rank: what it calls, how it is done, and what has become of it. Holds its
/// tensors until it is released. Any thread may wait.
class ShmWork : public c10d::Work, public Call {
 public:
  ShmWork(int rank, Request request, std::shared_ptr<const GroupNames> names,
          std::chrono::milliseconds timeout);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}
  void abort() override {}
  std::vector<at::Tensor> result() override { return results(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

  uint64_t hash() const override;
  std::string encoded() const override;
  std::string text() const override;

  const Request& request() const { return request_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  void set_place(Place place) { request_.place = std::move(place); }
  void set_sequence(uint64_t sequence) { sequence_ = sequence; }
  Plan& plan() { return *plan_; }
  void set_plan(std::unique_ptr<Plan> plan) { plan_ = std::move(plan); }
  /// A contiguous tensor of the same values that lives until the end: itself if it can be.
  at::Tensor given(const at::Tensor& tensor);
  /// A contiguous tensor whose values `tensor` has at the end: itself if it can be. `reads`: its
  /// values matter before, too.
  at::Tensor taken(const at::Tensor& tensor, bool reads);
  size_t bytes = 0;    ///< How much the call moves, roughly.
  bool begun = false;  ///< The others have been told.

  /// Blocks until it has ended, and leaves what became of it to `wait`.
  void await_end();
  /// Ends it: with the first error, or none. Runs the future's callbacks.
  void complete(std::exception_ptr error);

 private:
  const std::vector<at::Tensor>& results() const {
    return request_.outputs.empty() ? request_.inputs : request_.outputs;
  }
  CallSignature signature() const;
  void resolve(c10::ivalue::Future& future) const;

  Request request_;
  std::shared_ptr<const GroupNames> names_;
  std::chrono::milliseconds timeout_;
  uint64_t sequence_ = 0;
  std::unique_ptr<Plan> plan_;
  std::vector<at::Tensor> kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  ///< At the end: to, from.
  bool ended_ = false;  ///< The outcome is known; `completed_` when the future has it, too.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace lockstep::shm
