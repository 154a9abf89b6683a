#include "lockstep/comm/backends/hierarchical/staged_work.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>

#include "lockstep/comm/backends/tensor_checks.h"

namespace lockstep::hierarchical {
namespace {

using backends::Tensors;
using Copies = std::vector<std::pair<at::Tensor, at::Tensor>>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Gloo tells of a message's end only to the one who waits for it, so what sees the end first
/// writes the results.
class StagedWork final : public c10d::Work {
 public:
  StagedWork(WorkPtr inner, Tensors results, Copies copies)
      : c10d::Work(-1, inner->retrieveOpType()),
        inner_(std::move(inner)),
        results_(std::move(results)),
        copies_(std::move(copies)) {}

  bool isCompleted() override {
    if (!inner_->isCompleted()) return false;
    if (inner_->isSuccess()) write();
    return true;
  }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  Tensors result() override { return results_; }
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
          return c10::IValue(self->results_);
        },
        c10::ListType::ofTensors());
  }

 private:
  void write() {
    const std::lock_guard lock(mutex_);
    for (const auto& [to, from] : copies_) backends::write_to(to, from);
    copies_.clear();
  }

  const WorkPtr inner_;
  const Tensors results_;
  Copies copies_;  ///< Until they have been written.
};

Tensors contiguous(Tensors tensors) {
  const at::AutoDispatchBelowADInplaceOrView outside_autograd;
  for (auto& tensor : tensors) {
    if (tensor.layout() != at::kStrided) continue;
    if (tensor.requires_grad()) tensor = tensor.detach();
    if (!tensor.is_contiguous()) tensor = tensor.contiguous();
  }
  return tensors;
}

}  // namespace

Tensors Staging::given(const Tensors& tensors) {
  return contiguous(tensors);
}

Tensors Staging::taken(const Tensors& tensors) {
  const Tensors flat = contiguous(tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    results_.push_back(tensors[i]);
    if (flat[i].is_same(tensors[i]) || flat[i].is_alias_of(tensors[i])) continue;
    backends::expect_own_elements(operation_, tensors[i]);
    copies_.emplace_back(tensors[i], flat[i]);
  }
  return flat;
}

WorkPtr Staging::work(WorkPtr inner) {
  if (copies_.empty()) return inner;
  return c10::make_intrusive<StagedWork>(std::move(inner), std::move(results_), std::move(copies_));
}

}  // namespace lockstep::hierarchical
