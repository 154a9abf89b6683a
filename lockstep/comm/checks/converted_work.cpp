#include "lockstep/comm/checks/converted_work.h"

#include <ATen/core/ivalue.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace lockstep {
namespace {

using Future = c10::ivalue::Future;
using FuturePtr = c10::intrusive_ptr<Future>;

class ConvertedWork final : public c10d::Work {
 public:
  ConvertedWork(c10::intrusive_ptr<c10d::Work> inner, ErrorConversion convert)
      : c10d::Work(-1, inner->retrieveOpType()),
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
    return error ? convert_(error) : error;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    return converted([&] { return inner_->wait(timeout); });
  }
  void synchronize() override {
    converted([&] { inner_->synchronize(); });
  }
  void blockCurrentStream() override {
    converted([&] { inner_->blockCurrentStream(); });
  }

  FuturePtr getFuture() override {
    const std::lock_guard lock(mutex_);
    if (!future_) future_ = converted_future(inner_->getFuture());
    return future_;
  }

 private:
  template <class Call>
  auto converted(Call call) -> decltype(call()) {
    try {
      return call();
    } catch (...) {
      std::rethrow_exception(convert_(std::current_exception()));
    }
  }

  /// A future of the same value. One of a device keeps the backend's own: its streams and events
  /// hang on it.
  FuturePtr converted_future(FuturePtr inner) const {
    if (!inner || !inner->devices().empty()) return inner;
    auto child = inner->createInstance(inner->elementType());
    inner->addCallback(
        [child, convert = convert_](Future& done) {
          if (done.hasError()) {
            child->setError(convert(done.exception_ptr()));
          } else {
            child->markCompleted(done.constValue());
          }
        },
        /*uses_future=*/false);
    return child;
  }

  const c10::intrusive_ptr<c10d::Work> inner_;
  const ErrorConversion convert_;
  FuturePtr future_;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> make_converted_work(c10::intrusive_ptr<c10d::Work> inner,
                                                   ErrorConversion convert) {
  if (!inner) return inner;
  return c10::make_intrusive<ConvertedWork>(std::move(inner), std::move(convert));
}

}  // namespace lockstep
