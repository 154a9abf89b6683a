#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/join.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep {

/// torch.distributed.optim.ZeroRedundancyOptimizer: stage 1 of ZeRO (Rajbhandari et al. 2020). Each
/// rank keeps the optimizer's state of its part of the parameters and updates that part. Then all
/// get the new values. With DistributedDataParallel:
///
///     DistributedDataParallel ddp(model, group);
///     ZeroRedundancyOptimizer optimizer(
///         model->parameters(),
///         [](auto parts) { return make_optimizer("adam", std::move(parts), {.lr = 1e-3}); },
///         group);
///     ...
///     loss.backward();
///     optimizer.step();
///     optimizer.zero_grad();
///
/// The parameters end with the bits that the whole optimizer would give them on every rank.
///
/// All ranks give the same parameters, with the same values and gradients, and make the same calls.
/// `make` is called twice on each rank: for tensors without elements, to ask whether the optimizer
/// is elementwise, and for this rank's parts. The parameters move into flat memory, as with
/// Python's `parameters_as_bucket_view`: pointers to their old memory no longer see them. The
/// tensors stay the same. Frozen parameters may be among them and stay where they are.
///
/// Failures between ranks are CommErrors. One thread at a time. Destroy it before the World closes.
/// For ranks with different numbers of inputs see `Join`.
class ZeroRedundancyOptimizer : public Optimizer, public Joinable {
 public:
  /// A parameter that is there twice counts once. Throws UsageError for parameters that are sparse.
  /// A collective: ranks whose parameters differ get a MismatchError.
  ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters, const OptimizerFactory& make,
                          const ProcessGroup& group);
  /// For the parameters and the group of a DistributedDataParallel, which must outlive this. Then
  /// `step` throws UsageError after a batch within no_sync, whose gradients only add up.
  template <class ModulePtr>
  ZeroRedundancyOptimizer(DistributedDataParallel<ModulePtr>& ddp, const OptimizerFactory& make)
      : ZeroRedundancyOptimizer(ddp.module().parameters(), make, ddp.group()) {
    watch([&ddp] { return ddp.adding_up(); });
  }
  ~ZeroRedundancyOptimizer() override;

  /// More parameters, such as layers that were frozen until now, with an optimizer of their own
  /// made by `make`. Their indices go on after those that are there. A collective.
  void add_param_group(std::vector<at::Tensor> parameters, const OptimizerFactory& make);

  /// Updates the parameters on all ranks from their gradients. A collective. Throws UsageError for
  /// a sparse gradient, and for that of a parameter that was frozen when it was given.
  void step() override { step_scaled({}); }
  /// `scale` must be the same on all ranks. So must the learning rate: it is compared after the
  /// 2nd, 10th, 100th, ... step (MismatchError), though no longer after a Join.
  void step_scaled(const StepScale& scale) override;
  /// As lockstep::zero_grad of all parameters.
  void zero_grad(bool set_to_none = true);
  /// Of all groups of parameters.
  void set_lr(double lr) override;
  /// Of the first group.
  double lr() const override;
  const std::vector<at::Tensor>& parameters() const override;
  bool takes_grad_scale() const override;
  /// The whole optimizer's name.
  const std::string& name() const override;
  bool is_elementwise() const override;

  /// Collects the whole state on rank `to`, where state() then gives it. Every rank must call.
  /// Where one does not, the others throw TimeoutError.
  void consolidate_state_dict(int to = 0);
  /// The whole state as it was last consolidated on this rank: the one that the optimizer without
  /// shards would have, on the CPU. Throws UsageError where there is none.
  StateDict state() const override;
  /// Takes this rank's part of a whole state, which every rank gives. So a state of the optimizer
  /// without shards, or of another number of ranks, can be loaded. Throws CheckpointError where it
  /// does not fit this rank's part, and then changes nothing of that group on this rank.
  void load_state(const StateDict& state) override;

  /// The step overlaps with backward: made for DdpOptions::async_custom_hook, as Python's
  /// `hook_with_zero_step(allreduce_hook, ...)` with `overlap_with_ddp`. A bucket's parameters are
  /// updated and shared while the next bucket is averaged. From then on `step` does nothing, as in
  /// Python, and there is no clipping. Other than in Python no step is left out. The optimizer must
  /// outlive the DistributedDataParallel.
  AsyncGradientHook hook_with_zero_step();

  /// Of the optimizer's state on this rank.
  int64_t state_bytes() const;

  /// A rank without inputs updates its part from the gradients that are there.
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override;
  const ProcessGroup& join_process_group() const override;

 private:
  void watch(std::function<bool()> adding_up);

  class Hook;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// "zero1": stage 1 of ZeRO (Rajbhandari et al. 2020). As ddp, but each rank keeps the optimizer's
/// state of its part of the parameters only (see ZeroRedundancyOptimizer). For float32 and Adam a
/// rank keeps 8P + 8P/N bytes in place of 16P, where P counts parameters and N ranks.
///
/// The parameters get ddp's bits. ZeroOptions::reduce_dtype may be float16 or bfloat16. Then
/// gradients are averaged in it, as by DDP's hooks fp16_compress and bf16_compress. The module's
/// parameters move to other memory.
std::unique_ptr<Strategy> make_zero1_strategy(const StrategySetup& setup);

/// "zero2": stage 2. A rank also keeps the gradients of its part only: 4P + 12P/N bytes. Whole
/// gradients are reduced, part by part to their ranks, and given up, while backward runs. Batches
/// whose gradients only add up keep whole ones until the last batch of the step.
///
/// The parameters get ddp's bits over shared memory, and for two ranks over any backend. Other sums
/// of three or more ranks add in another order than ddp's. clip_grad_norm has a norm that differs
/// from ddp's by rounding. Every parameter must get a gradient, as with ddp. An optimizer that is
/// not elementwise is a UsageError. ZeroOptions::reduce_dtype may be any floating-point dtype.
std::unique_ptr<Strategy> make_zero2_strategy(const StrategySetup& setup);

namespace detail {
class RowStrategy;
std::unique_ptr<RowStrategy> make_zero1_row(const StrategySetup& setup, bool micro_batches);
std::unique_ptr<RowStrategy> make_zero2_row(const StrategySetup& setup, bool micro_batches);
}  // namespace detail

}  // namespace lockstep
