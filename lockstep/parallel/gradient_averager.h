#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp.h"

namespace lockstep {

/// The defaults are those of DdpOptions.
struct GradientAveragerOptions {
  double bucket_cap_mb = 25;   ///< Gradients per all-reduce, in MiB: few calls that still overlap.
  double first_bucket_mb = 1;  ///< At most bucket_cap_mb; a small first one starts early.
  bool gradient_as_bucket_view = true;  ///< Saves one copy per step.
  /// Check that the ranks' parameters match and broadcast rank 0's parameters and buffers.
  bool init_sync = true;
  CommHook comm_hook = CommHook::none;  ///< As DdpOptions::comm_hook.
  /// Compare the ranks' parameters after the 2nd, 10th, 100th, ... step, as
  /// DdpOptions::check_drift.
  bool check_drift = true;
};

/// Data parallelism without a wrapper: the model stays what it is. What DistributedDataParallel
/// does hangs on the gradients themselves: each backward averages them over the ranks while it
/// runs, with the same buckets, code and bits.
///
///     Net model;                                             // on every rank
///     lockstep::GradientAverager averager(model, world.group());
///     torch::optim::SGD optimizer(model.parameters(), 0.1);  // and the loop as it was
///
/// So the model may be on the stack, go into functions as `Net&`, return structs, and run several
/// times per step; a GAN has an averager for each network. A layer that `checkpoint` runs several
/// times in a backward is a UsageError: DistributedDataParallel takes it with `static_graph`. Every
/// rank must run the same backward passes. Gradients are averaged when all parameters have got
/// theirs, in one backward or in several. A parameter that stays without one is a UsageError that
/// names it, in the next backward; for such models take DistributedDataParallel with
/// `find_unused_parameters`. The same error comes once after a backward that threw. Go on only
/// where it threw on all ranks at the same place: their calls would no longer fit together. In a
/// backward of
/// distributed autograd the gradients of its rpc::AutogradContext are averaged. Parameters that
/// need no gradient when this is made are left alone.
///
/// Values may be put into the parameters afterwards (torch::load, set_data). To freeze or
/// unfreeze layers, or to convert or add some, is always one, in the next backward: make the
/// averager anew. Added ones are noticed where this was made of a module, as with
/// DistributedDataParallel. The next backward also compares the ranks' parameters, as its forward.
///
/// The constructors check that all ranks have the same parameters (MismatchError on every rank,
/// naming the first that differs), and broadcast those of rank 0. They are collectives. Random
/// numbers stay each rank's own: unseeded ranks draw other data, ranks seeded alike the same
/// dropout and noise (see rank_generator). A group of
/// one rank communicates nothing. Failures between ranks leave backward as CommError. One thread at
/// a time. Keep the process group alive as long as this, and drop this before the module.
class GradientAverager {
 public:
  /// Of all parameters of `module`. Its buffers are broadcast too. It must outlive this.
  GradientAverager(torch::nn::Module& module, const ProcessGroup& group,
                   const GradientAveragerOptions& options = {});
  /// Of these parameters, as `module.parameters()` gives them. Errors call them by number. Sparse
  /// gradients (Embedding) are known by their module only: give that.
  GradientAverager(const std::vector<at::Tensor>& parameters, const ProcessGroup& group,
                   const GradientAveragerOptions& options = {});

  /// Rank 0's buffers (the statistics of batch norm, say) go to all ranks. Nothing else does it: it
  /// is for before an evaluation or a save. UsageError where this was made of parameters. A
  /// collective.
  void sync_buffers();

  /// While the guard lives, backward only adds gradients up. The first backward after it averages
  /// the sum.
  NoSync no_sync() { return NoSync(core_->synchronizing()); }

  const ProcessGroup& group() const { return core_->group(); }
  /// `iterations` counts the times that gradients were averaged.
  DdpStatistics statistics() const { return core_->statistics(); }

 private:
  std::unique_ptr<detail::DdpCore> core_;
  bool has_module_;
};

}  // namespace lockstep
