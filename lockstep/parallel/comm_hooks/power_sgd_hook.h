#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp.h"

namespace lockstep {

/// The options of torch's PowerSGDState, with its defaults.
struct PowerSGDOptions {
  /// Columns of the two matrices that stand for a gradient. Try 1, 2, 4: more of them are more
  /// exact and send more.
  int64_t matrix_approximation_rank = 1;
  /// Backwards before which gradients are averaged as they are. Some tenth of all steps: early
  /// gradients suffer most. At least 2 with error feedback or warm start, as
  /// DistributedDataParallel makes its buckets anew after the first backward.
  int64_t start_power_sgd_iter = 1000;
  double min_compression_rate = 2;  ///< Tensors that would shrink by less are sent as they are.
  bool use_error_feedback = true;   ///< What a step lost is added to the next one's gradients.
  bool warm_start = true;           ///< Goes on from the last step's matrices.
  double orthogonalization_epsilon = 0;  ///< Above 0 for gradients of which columns are all 0.
  uint32_t random_seed = 0;              ///< Of the first matrices: the same on all ranks.
  /// Multiplies matrices of one shape together. Pays for many small ones in one bucket.
  bool batch_tensors_with_same_shape = false;
};

/// How far PowerSGD is, and what it keeps from step to step: as torch's PowerSGDState.
class PowerSGDState {
 public:
  /// Throws UsageError for a rank below 1, a rate that is not above 0, and a start that is too
  /// early.
  explicit PowerSGDState(const PowerSGDOptions& options = {});
  ~PowerSGDState();

  struct CompressionStats {
    double rate = 0;  ///< 0 while nothing was compressed.
    int64_t numel_before = 0;
    int64_t numel_after = 0;
  };
  CompressionStats compression_stats() const;
  int64_t iter() const;  ///< Backwards so far.

  struct Impl;

 private:
  friend AsyncGradientHook power_sgd_hook(std::shared_ptr<PowerSGDState> state);
  friend AsyncGradientHook batched_power_sgd_hook(std::shared_ptr<PowerSGDState> state);
  std::shared_ptr<Impl> impl_;
};

/// Sends gradients as products of two narrow matrices, in place of themselves (Vogels et al.,
/// "PowerSGD", NeurIPS 2019). The algorithm, and over Gloo the bits, of torch's powerSGD_hook. For
/// links that are slow: on one host it costs more than it saves. One state for one
/// DistributedDataParallel. The parameters must be of one dtype. A backward with infinite or NaN
/// gradients leaves the errors as they were before it, as a GradScaler skips its step. (Python's
/// state becomes NaN and stays so.)
AsyncGradientHook power_sgd_hook(std::shared_ptr<PowerSGDState> state);

/// torch's batched_powerSGD_hook: a bucket as one square matrix. Faster, and less exact. A rank
/// above the square's side counts as the side, and `orthogonalization_epsilon` is heeded. (Python
/// refuses the one and ignores the other.)
AsyncGradientHook batched_power_sgd_hook(std::shared_ptr<PowerSGDState> state);

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

}  // namespace lockstep
