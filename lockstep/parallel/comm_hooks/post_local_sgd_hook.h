#pragma once

#include <cstdint>
#include <memory>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp.h"

namespace lockstep {

/// What post_local_sgd_hook does, and how far it is; as torch's PostLocalSGDState.
struct PostLocalSGDState {
  ProcessGroup subgroup;             ///< Whose gradients are averaged once local SGD has started.
  int64_t start_local_sgd_iter = 0;  ///< Backwards before which all ranks' gradients are averaged.
  /// False: from then on gradients are not averaged at all.
  bool post_local_gradient_allreduce = true;
  int64_t iter = 0;  ///< Backwards so far, up to the start. Set it when a run resumes.

  /// A null `subgroup` stands for the ranks of this host. A collective of `group`. Throws
  /// UsageError for a negative start.
  PostLocalSGDState(const ProcessGroup& group, ProcessGroup subgroup, int64_t start_local_sgd_iter,
                    bool post_local_gradient_allreduce = true);
};

/// Averages gradients over the group of DistributedDataParallel at first and over `state->subgroup`
/// later: torch's post_localSGD_hook. Parameters must then be averaged now and then, after the
/// optimizer's step: see PostLocalSGDOptimizer. Sums have the bits of DDP without a hook.
AsyncGradientHook post_local_sgd_hook(std::shared_ptr<PostLocalSGDState> state);

namespace detail {

/// The mean of a bucket over a group, in the background: what the hooks of this folder begin with.
std::function<at::Tensor()> start_mean(const ProcessGroup& group, const at::Tensor& gradients);

}  // namespace detail
}  // namespace lockstep
