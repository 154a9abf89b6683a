#include "lockstep/comm/checks/checked_work.h"

#include <ATen/core/ivalue.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/comm/checks/failure_report.h"

namespace lockstep {
namespace {

using Future = c10::ivalue::Future;

/// What a failure of the work is reported with; small enough to be copied into a callback.
struct Report {
  std::shared_ptr<CheckContext> context;
  CallSummary call;
  std::chrono::milliseconds timeout;
  int peer;

  std::exception_ptr translate(const std::exception_ptr& error,
                               std::chrono::milliseconds waited) const {
    return translate_failure(error, *context, call, waited.count() > 0 ? waited : timeout, peer);
  }
};

class CheckedWork final : public c10d::Work {
 public:
  CheckedWork(c10::intrusive_ptr<c10d::Work> inner, Report report)
      : c10d::Work(report.context->rank(), inner->retrieveOpType()),
        inner_(std::move(inner)),
        report_(std::move(report)) {}

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void abort() override { inner_->abort(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }
  c10::intrusive_ptr<Future> getFutureResult() override { return inner_->getFutureResult(); }

  std::exception_ptr exception() const override {
    const auto error = inner_->exception();
    return error ? failure(error, kNoTimeout) : error;
  }

  bool wait(std::chrono::milliseconds timeout) override {
    return translated(timeout, [&] { return inner_->wait(timeout); });
  }
  void synchronize() override {
    translated(kNoTimeout, [&] { inner_->synchronize(); });
  }
  void blockCurrentStream() override {
    translated(kNoTimeout, [&] { inner_->blockCurrentStream(); });
  }

  c10::intrusive_ptr<Future> getFuture() override {
    std::lock_guard lock(mutex_);
    if (!future_) future_ = translated_future(inner_->getFuture());
    return future_;
  }

 private:
  template <class Call>
  auto translated(std::chrono::milliseconds timeout, Call call) -> decltype(call()) {
    try {
      return call();
    } catch (...) {
      std::rethrow_exception(failure(std::current_exception(), timeout));
    }
  }

  /// What the caller gets for the backend's error: looked into once. A wait that the caller cut
  /// short says nothing about the group, and nobody is asked.
  std::exception_ptr failure(const std::exception_ptr& error,
                             std::chrono::milliseconds timeout) const {
    if (timeout.count() > 0 && timeout < report_.timeout && !inner_->isCompleted() &&
        failure_kind(error) == FailureKind::timeout)
      return short_wait_error(*report_.context, report_.call, timeout);
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = report_.translate(error, timeout);
    return failure_;
  }

  /// A future of the same value. One of a device keeps the backend's own: its streams and events
  /// hang on it, and its errors come by other ways.
  c10::intrusive_ptr<Future> translated_future(c10::intrusive_ptr<Future> inner) const {
    if (!inner || !inner->devices().empty()) return inner;
    auto child = inner->createInstance(inner->elementType());
    inner->addCallback(
        [child, report = report_](Future& done) {
          if (done.hasError()) {
            child->setError(report.translate(done.exception_ptr(), kNoTimeout));
          } else {
            child->markCompleted(done.constValue());
          }
        },
        /*uses_future=*/false);
    return child;
  }

  c10::intrusive_ptr<c10d::Work> inner_;
  Report report_;
  c10::intrusive_ptr<Future> future_;
  mutable std::exception_ptr failure_;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> make_checked_work(c10::intrusive_ptr<c10d::Work> inner,
                                                 std::shared_ptr<CheckContext> context,
                                                 const CallSummary& call,
                                                 std::chrono::milliseconds timeout, int peer) {
  return c10::make_intrusive<CheckedWork>(std::move(inner),
                                          Report{std::move(context), call, timeout, peer});
}

}  // namespace lockstep
