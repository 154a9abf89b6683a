#include "lockstep/comm/checks/checked_work.h"

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/comm/checks/failure_report.h"
#include "lockstep/comm/checks/translated_work.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

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
  CheckedWork(c10::intrusive_ptr<c10d::Work> inner, Report report, WorkWatch watch)
      : TranslatedWork(report.context->rank(), std::move(inner),
                       [report](const std::exception_ptr& error) {
                         return report.translate(error, kNoTimeout);
                       }),
        report_(std::move(report)),
        watch_(watch) {}

  bool wait(milliseconds timeout) override {
    if (watch_ == WorkWatch::limit && timeout == kNoTimeout) timeout = report_.timeout;
    if (watch_ != WorkWatch::deaths || timeout.count() < 0) return TranslatedWork::wait(timeout);
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

 private:
  [[noreturn]] void give_up(const std::vector<int>& died, milliseconds timeout) const {
    report_.context->leave_work_behind();
    const std::lock_guard lock(mutex_);
    if (!failure_) {
      failure_ = translate_failure(std::make_exception_ptr(std::runtime_error(kMissed)),
                                   *report_.context, report_.call,
                                   timeout.count() > 0 ? timeout : report_.timeout, -1, died);
    }
    std::rethrow_exception(failure_);
  }

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

  const Report report_;
  const WorkWatch watch_;
  mutable std::exception_ptr failure_;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> make_checked_work(c10::intrusive_ptr<c10d::Work> inner,
                                                 std::shared_ptr<CheckContext> context,
                                                 const CallSummary& call,
                                                 std::chrono::milliseconds timeout, int peer,
                                                 WorkWatch watch) {
  return c10::make_intrusive<CheckedWork>(std::move(inner),
                                          Report{std::move(context), call, timeout, peer}, watch);
}

}  // namespace lockstep
