#include "lockstep/parallel/zero/overlapped_steps.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::detail {

OverlappedSteps::OverlappedSteps(ShardedOptimizer& optimizer) : optimizer_(optimizer) {
  const auto& parameters = optimizer_.shards().parameters();
  for (size_t i = 0; i < parameters.size(); ++i) index_of_[parameters[i].unsafeGetTensorImpl()] = i;
}

std::function<at::Tensor()> OverlappedSteps::begin(const ProcessGroup& group,
                                                   GradientBucket& bucket) {
  const c10::AutoGradMode no_grad(false);
  Averaged next{{}, bucket.gradients, {}};
  for (const at::Tensor& parameter : bucket.parameters) {
    const auto found = index_of_.find(parameter.unsafeGetTensorImpl());
    if (found == index_of_.end())
      throw UsageError("hook_with_zero_step: the module has a parameter that the optimizer lacks",
                       "give the optimizer all parameters that need a gradient");
    next.parameters.push_back(found->second);
  }
  next.gradients.div_(group.size());
  next.work = group.all_reduce_async(next.gradients);
  finish_open();
  open_ = std::move(next);
  return [this, gradients = bucket.gradients, last = bucket.is_last] {
    if (last) {
      finish_open();
      for (const Work& work : shared_) work.wait();
      shared_.clear();
    }
    return gradients;
  };
}

/// A bucket's gradients lie one after the other, each in the order of its parameter's memory.
void OverlappedSteps::finish_open() {
  if (!open_) return;
  const c10::AutoGradMode no_grad(false);
  const Averaged bucket = *std::exchange(open_, std::nullopt);
  bucket.work.wait();
  for (int64_t at = 0; const size_t index : bucket.parameters) {
    const int64_t count = optimizer_.shards().parameters()[index].numel();
    optimizer_.take_gradient(index, bucket.gradients.narrow(0, at, count));
    at += count;
  }
  optimizer_.update({});
  optimizer_.drop_gradients();
  for (Work& work : optimizer_.shards().share(bucket.parameters))
    shared_.push_back(std::move(work));
}

}  // namespace lockstep::detail
