#include "lockstep/comm/checks/pending_work.h"

#include "lockstep/base/error.h"
#include "lockstep/comm/checks/failure_report.h"

namespace lockstep {

PendingWork::PendingWork(std::shared_ptr<CheckContext> context, const CallSummary& call,
                         c10d::OpType type)
    : c10d::Work(context->rank(), type), context_(std::move(context)), call_(call) {}

void PendingWork::issued(c10::intrusive_ptr<c10d::Work> inner, int peer) {
  {
    std::lock_guard lock(mutex_);
    inner_ = std::move(inner);
    peer_ = peer;
  }
  settled_.notify_all();
}

void PendingWork::failed(std::exception_ptr error) {
  {
    std::lock_guard lock(mutex_);
    if (exception_) return;
    exception_ = std::move(error);
  }
  settled_.notify_all();
}

c10::intrusive_ptr<c10d::Work> PendingWork::inner() const {
  std::lock_guard lock(mutex_);
  return inner_;
}

bool PendingWork::isCompleted() {
  const auto work = inner();
  if (work) return work->isCompleted();
  std::lock_guard lock(mutex_);
  return exception_ != nullptr;
}

bool PendingWork::isSuccess() const {
  const auto work = inner();
  return work && work->isSuccess();
}

std::exception_ptr PendingWork::exception() const {
  if (const auto work = inner()) return work->exception();
  std::lock_guard lock(mutex_);
  return exception_;
}

int PendingWork::sourceRank() const {
  std::lock_guard lock(mutex_);
  return peer_ >= 0 || !inner_ ? peer_ : inner_->sourceRank();
}

std::vector<at::Tensor> PendingWork::result() {
  const auto work = inner();
  return work ? work->result() : std::vector<at::Tensor>();
}

bool PendingWork::wait(std::chrono::milliseconds timeout) {
  const auto start = std::chrono::steady_clock::now();
  c10::intrusive_ptr<c10d::Work> work;
  {
    std::unique_lock lock(mutex_);
    const auto settled = [this] { return inner_ || exception_; };
    if (timeout.count() <= 0) {
      settled_.wait(lock, settled);  // The gate fails it at the group's time-out.
    } else if (!settled_.wait_for(lock, timeout, settled)) {
      std::rethrow_exception(short_wait_error(*context_, call_, timeout));
    }
    if (exception_) std::rethrow_exception(exception_);
    work = inner_;
  }
  if (timeout.count() <= 0) return work->wait(timeout);
  const auto used = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - start);
  return work->wait(std::max(timeout - used, std::chrono::milliseconds(1)));
}

void PendingWork::abort() {
  if (const auto work = inner()) return work->abort();
  failed(std::make_exception_ptr(CommError(context_->me() + ": " +
                                           describe(call_, context_->names()) + " in group '" +
                                           context_->group() + "' was given up before it began")));
}

bool PendingWork::given_up() const {
  std::lock_guard lock(mutex_);
  return exception_ != nullptr;
}

}  // namespace lockstep
