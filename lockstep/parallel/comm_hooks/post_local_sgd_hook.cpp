#include "lockstep/parallel/comm_hooks/power_sgd_hook.h"

#include <string>

#include "lockstep/base/error.h"
#include "lockstep/parallel/averaging/averagers.h"

namespace lockstep {

PostLocalSGDState::PostLocalSGDState(const ProcessGroup& group, ProcessGroup given, int64_t start,
                                     bool allreduce)
    : subgroup(given ? std::move(given) : new_subgroup_of_host(group)),
      start_local_sgd_iter(start),
      post_local_gradient_allreduce(allreduce) {
  if (start < 0) {
    throw UsageError("PostLocalSGDState: local SGD starts at backward " + std::to_string(start) +
                     "; expected 0 or more");
  }
}

AsyncGradientHook post_local_sgd_hook(std::shared_ptr<PostLocalSGDState> state) {
  if (!state) throw UsageError("post_local_sgd_hook: the state is null");
  return [state](const ProcessGroup& group, GradientBucket& bucket) -> std::function<at::Tensor()> {
    if (state->iter < state->start_local_sgd_iter) {
      state->iter += bucket.is_last ? 1 : 0;
      return detail::start_mean(group, bucket.gradients);
    }
    if (!state->post_local_gradient_allreduce) {
      return [gradients = bucket.gradients] { return gradients; };
    }
    return detail::start_mean(state->subgroup, bucket.gradients);
  };
}

std::function<at::Tensor()> detail::start_mean(const ProcessGroup& group,
                                               const at::Tensor& gradients) {
  at::Tensor mean = gradients;
  mean.div_(group.size());
  return [work = group.all_reduce_async(mean), mean] {
    work.wait();
    return mean;
  };
}

}  // namespace lockstep
