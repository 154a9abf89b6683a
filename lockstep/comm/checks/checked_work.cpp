#include "lockstep/comm/checks/checked_work.h"

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/comm/checks/failure_report.h"
#include "lockstep/comm/checks/flight_recorder.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Future = c10::ivalue::Future;
using FuturePtr = c10::intrusive_ptr<Future>;

/// A future of the same value. One of a device keeps the backend's own: its streams and events hang
/// on it, and its errors come by other ways.
FuturePtr converted_future(const FuturePtr& inner, ErrorConversion convert) {
  if (!inner || !inner->devices().empty()) return inner;
  auto child = inner->createInstance(inner->elementType());
  inner->addCallback(
      [child, convert = std::move(convert)](Future& done) {
        if (done.hasError()) {
          child->setError(convert(done.exception_ptr()));
        } else {
          child->markCompleted(done.constValue());
        }
      },
      /*uses_future=*/false);
  return child;
}

/// Decorates a work: wait, exception and future give what `convert` makes of its errors. All else
/// passes.
class TranslatedWork : public c10d::Work {
 public:
  TranslatedWork(int rank, c10::intrusive_ptr<c10d::Work> inner, ErrorConversion convert)
      : c10d::Work(rank, inner->retrieveOpType()),
        inner_(std::move(inner)),
        convert_(std::move(convert)) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void abort() override { inner_->abort(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }
  FuturePtr getFutureResult() override { return inner_->getFutureResult(); }

  std::exception_ptr exception() const override {
    const auto error = inner_->exception();
    return error ? translate(error, kNoTimeout) : error;
  }
  bool wait(milliseconds timeout) override {
    return translated(timeout, [&] { return inner_->wait(timeout); });
  }
  void synchronize() override {
    translated(kNoTimeout, [&] { inner_->synchronize(); });
  }
  void blockCurrentStream() override {
    translated(kNoTimeout, [&] { inner_->blockCurrentStream(); });
  }
  FuturePtr getFuture() override {
    const std::lock_guard lock(mutex_);
    if (!future_) future_ = converted_future(inner_->getFuture(), convert_);
    return future_;
  }

 protected:
  /// What the caller gets for the inner work's error, except from the future, which may outlive
  /// this work. `timeout`: of the wait that met it, or kNoTimeout.
  virtual std::exception_ptr translate(const std::exception_ptr& error,
                                       milliseconds /*timeout*/) const {
    return convert_(error);
  }
  c10d::Work& inner() const { return *inner_; }

 private:
  template <class Call>
  auto translated(milliseconds timeout, Call call) -> decltype(call()) {
    try {
      return call();
    } catch (...) {
      std::rethrow_exception(translate(std::current_exception(), timeout));
    }
  }

  const c10::intrusive_ptr<c10d::Work> inner_;
  const ErrorConversion convert_;
  FuturePtr future_;
};

/// Gloo's work for it keeps to no time-out of a wait.
bool is_reduce_scatter(Operation operation) {
  return operation == Operation::reduce_scatter || operation == Operation::reduce_scatter_tensor ||
         operation == Operation::reduce_scatter_tensor_coalesced;
}

/// How often a wait looks who has died. A look reads three files of /proc per rank, and asks the
/// store for ranks whose process it does not know, and for those that have ended.
constexpr milliseconds kLook{250};
/// How long a backend may take to notice a death itself.
constexpr milliseconds kGrace{2'000};

/// As backends tell of a lost connection (see failure_kind).
constexpr const char* kMissed = "connection closed, which the backend did not notice";

/// What a failure of the work is reported with; small enough to be copied into a callback.
struct Report {
  std::shared_ptr<CheckContext> context;
  std::shared_ptr<const CallSignature> call;
  std::chrono::milliseconds timeout;
  uint64_t recorded = FlightRecorder::take();

  std::exception_ptr translate(const std::exception_ptr& error, std::chrono::milliseconds waited,
                               const std::vector<int>& died = {}) const {
    auto failure =
        translate_failure(error, *context, *call, waited.count() > 0 ? waited : timeout, died);
    ended(failure);
    return failure;
  }
  void ended(const std::exception_ptr& error) const {
    FlightRecorder::of_process().end(recorded, error);
  }
};

class CheckedWork final : public TranslatedWork {
 public:
  CheckedWork(c10::intrusive_ptr<c10d::Work> inner, Report report, bool misses_deaths)
      : TranslatedWork(report.context->rank(), std::move(inner),
                       [report](const std::exception_ptr& error) {
                         return report.translate(error, kNoTimeout);
                       }),
        report_(std::move(report)),
        misses_deaths_(misses_deaths) {}

  bool wait(milliseconds timeout) override {
    const bool done = wait_watched(timeout);
    if (done) report_.ended(nullptr);
    return done;
  }
  FuturePtr getFuture() override {
    auto future = TranslatedWork::getFuture();
    if (future && !future_is_noted_.exchange(true))
      future->addCallback(
          [report = report_](Future& done) {
            if (!done.hasError()) report.ended(nullptr);
          },
          /*uses_future=*/false);
    return future;
  }

 private:
  bool wait_watched(milliseconds timeout) {
    const CallSignature& call = *report_.call;
    const bool limits = misses_deaths_ && call.is_message() && timeout == kNoTimeout;
    if (!misses_deaths_ || call.is_message() || is_reduce_scatter(call.operation) ||
        timeout.count() < 0)
      return TranslatedWork::wait(limits ? report_.timeout : timeout);
    const auto begin = Clock::now();
    std::optional<Clock::time_point> seen;  // The first death that is still one.
    while (true) {
      const auto used = std::chrono::duration_cast<milliseconds>(Clock::now() - begin);
      const bool last = timeout.count() > 0 && timeout - used <= kLook;
      try {
        const bool done = inner().wait(last ? std::max(timeout - used, milliseconds(1)) : kLook);
        if (done || last) return done;
      } catch (...) {
        const auto failed = inner().exception();  // Else it is this look that has ended.
        if (failed) std::rethrow_exception(translate(failed, timeout));
        const auto now = std::current_exception();
        if (last || failure_kind(now) != FailureKind::timeout)
          std::rethrow_exception(translate(now, timeout));
      }
      if (inner().isCompleted()) continue;
      if (is_over()) give_up({}, timeout);
      const auto died = report_.context->died();
      if (died.empty()) {
        seen.reset();
      } else if (!seen) {
        seen = Clock::now();
      } else if (Clock::now() - *seen >= kGrace) {
        give_up(died, timeout);
      }
    }
  }

  /// Whether a later generation has begun, for which no rank is at fault.
  bool is_over() const {
    const auto failure = report_.context->seen_failure();
    return failure && failure->kind == Failure::Kind::gave_up && failure->ranks.empty();
  }

  [[noreturn]] void give_up(const std::vector<int>& died, milliseconds timeout) const {
    report_.context->abandon_work();
    const std::lock_guard lock(mutex_);
    if (!failure_) {
      failure_ =
          report_.translate(std::make_exception_ptr(std::runtime_error(kMissed)), timeout, died);
    }
    std::rethrow_exception(failure_);
  }

  /// What the caller gets for the backend's error: looked into once. A wait that the caller cut
  /// short says nothing about the group, and nobody is asked.
  std::exception_ptr translate(const std::exception_ptr& error,
                               std::chrono::milliseconds timeout) const override {
    if (timeout.count() > 0 && timeout < report_.timeout && !inner().isCompleted() &&
        failure_kind(error) == FailureKind::timeout)
      return short_wait_error(*report_.context, *report_.call, timeout);
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = report_.translate(error, timeout);
    return failure_;
  }

  const Report report_;
  const bool misses_deaths_;
  std::atomic<bool> future_is_noted_{false};
  mutable std::exception_ptr failure_;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> make_translated_work(c10::intrusive_ptr<c10d::Work> inner,
                                                    ErrorConversion convert) {
  return c10::make_intrusive<TranslatedWork>(-1, std::move(inner), std::move(convert));
}

c10::intrusive_ptr<c10d::Work> make_checked_work(c10::intrusive_ptr<c10d::Work> inner,
                                                 std::shared_ptr<CheckContext> context,
                                                 CallSignature call,
                                                 std::chrono::milliseconds timeout,
                                                 bool misses_deaths) {
  auto shared = std::make_shared<const CallSignature>(std::move(call));
  return c10::make_intrusive<CheckedWork>(
      std::move(inner), Report{std::move(context), std::move(shared), timeout}, misses_deaths);
}

}  // namespace lockstep
