#include "lockstep/comm/checks/translated_work.h"

#include <mutex>
#include <utility>

namespace lockstep {
namespace {

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

}  // namespace

TranslatedWork::TranslatedWork(int rank, c10::intrusive_ptr<c10d::Work> inner,
                               ErrorConversion convert)
    : c10d::Work(rank, inner->retrieveOpType()),
      inner_(std::move(inner)),
      convert_(std::move(convert)) {}

std::exception_ptr TranslatedWork::exception() const {
  const auto error = inner_->exception();
  return error ? translate(error, kNoTimeout) : error;
}

template <class Call>
auto TranslatedWork::translated(std::chrono::milliseconds timeout, Call call) -> decltype(call()) {
  try {
    return call();
  } catch (...) {
    std::rethrow_exception(translate(std::current_exception(), timeout));
  }
}

bool TranslatedWork::wait(std::chrono::milliseconds timeout) {
  return translated(timeout, [&] { return inner_->wait(timeout); });
}

void TranslatedWork::synchronize() {
  translated(kNoTimeout, [&] { inner_->synchronize(); });
}

void TranslatedWork::blockCurrentStream() {
  translated(kNoTimeout, [&] { inner_->blockCurrentStream(); });
}

FuturePtr TranslatedWork::getFuture() {
  const std::lock_guard lock(mutex_);
  if (!future_) future_ = converted_future(inner_->getFuture(), convert_);
  return future_;
}

}  // namespace lockstep
