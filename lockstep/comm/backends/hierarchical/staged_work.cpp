#include "lockstep/comm/backends/hierarchical/staged_work.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>

#include "lockstep/comm/backends/tensor_checks.h"

namespace lockstep::hierarchical {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Gloo tells of a message's end only to the one who waits for it, so what sees the end first
/// writes the results.
class StagedWork final : public c10d::Work {
 public:
  StagedWork(WorkPtr inner, at::Tensor result, at::Tensor copy)
      : c10d::Work(-1, inner->retrieveOpType()),
        inner_(std::move(inner)),
        result_(std::move(result)),
        copy_(std::move(copy)) {}

  bool isCompleted() override {
    if (!inner_->isCompleted()) return false;
    if (inner_->isSuccess()) write();
    return true;
  }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return {result_}; }
  void synchronize() override { inner_->synchronize(); }
  void abort() override { inner_->abort(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = inner_->wait(timeout);
    if (done) write();
    return done;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const auto self = c10::intrusive_ptr<StagedWork>::unsafe_reclaim_from_nonowning(this);
    return inner_->getFuture()->then(
        [self](c10::ivalue::Future& done) {
          if (done.hasError()) std::rethrow_exception(done.exception_ptr());
          self->write();
          return c10::IValue(self->result());
        },
        c10::ListType::ofTensors());
  }

 private:
  void write() {
    const std::lock_guard lock(mutex_);
    if (copy_.defined()) backends::write_to(result_, copy_);
    copy_.reset();
  }

  const WorkPtr inner_;
  const at::Tensor result_;
  at::Tensor copy_;  ///< Until the result is written.
};

/// What Gloo takes in place of the tensor: without autograd, and plain.
at::Tensor plain(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView outside_autograd;
  if (!backends::is_plain(tensor)) return backends::plain_copy(tensor);
  return tensor.requires_grad() ? tensor.detach() : tensor;
}

}  // namespace

at::Tensor Staging::given(const at::Tensor& tensor) {
  return plain(tensor);
}

at::Tensor Staging::taken(const at::Tensor& tensor) {
  result_ = tensor;
  at::Tensor flat = plain(tensor);
  if (backends::is_plain(tensor)) return flat;
  backends::expect_own_elements(operation_, tensor);
  return copy_ = flat;
}

WorkPtr Staging::work(WorkPtr inner) {
  if (!copy_.defined()) return inner;
  return c10::make_intrusive<StagedWork>(std::move(inner), std::move(result_), std::move(copy_));
}

}  // namespace lockstep::hierarchical
