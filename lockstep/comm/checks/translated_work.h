#pragma once

#include <ATen/core/ivalue.h>

#include <chrono>
#include <exception>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "lockstep/comm/checks/error_conversion.h"

namespace lockstep {

/// Decorates a work: wait, exception and future give what `convert` makes of its errors. All else
/// passes.
class TranslatedWork : public c10d::Work {
 public:
  TranslatedWork(int rank, c10::intrusive_ptr<c10d::Work> inner, ErrorConversion convert);
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void abort() override { inner_->abort(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    return inner_->getFutureResult();
  }

  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  void blockCurrentStream() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 protected:
  /// What the caller gets for the inner work's error, except from the future, which may outlive
  /// this work. `timeout`: of the wait that met it, or kNoTimeout.
  virtual std::exception_ptr translate(const std::exception_ptr& error,
                                       std::chrono::milliseconds /*timeout*/) const {
    return convert_(error);
  }
  c10d::Work& inner() const { return *inner_; }

 private:
  template <class Call>
  auto translated(std::chrono::milliseconds timeout, Call call) -> decltype(call());

  const c10::intrusive_ptr<c10d::Work> inner_;
  const ErrorConversion convert_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace lockstep
