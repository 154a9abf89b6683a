#include "lockstep/comm/checks/checked_work.h"

#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/comm/checks/failure_report.h"
#include "lockstep/comm/checks/translated_work.h"

namespace lockstep {
namespace {

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

class CheckedWork final : public TranslatedWork {
 public:
  CheckedWork(c10::intrusive_ptr<c10d::Work> inner, Report report)
      : TranslatedWork(report.context->rank(), std::move(inner)), report_(std::move(report)) {}

 private:
  /// What the caller gets for the backend's error: looked into once. A wait that the caller cut
  /// short says nothing about the group, and nobody is asked.
  std::exception_ptr translate(const std::exception_ptr& error,
                               std::chrono::milliseconds timeout) const override {
    if (timeout.count() > 0 && timeout < report_.timeout && !inner().isCompleted() &&
        failure_kind(error) == FailureKind::timeout)
      return short_wait_error(*report_.context, report_.call, timeout);
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = report_.translate(error, timeout);
    return failure_;
  }

  ErrorConversion future_conversion() const override {
    return [report = report_](const std::exception_ptr& error) {
      return report.translate(error, kNoTimeout);
    };
  }

  const Report report_;
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
