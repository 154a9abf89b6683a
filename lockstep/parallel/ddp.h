#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/join.h"
#include "lockstep/parallel/strategy_options.h"
#include "lockstep/parallel/wrapped_module.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

/// What a DistributedDataParallel has done so far.
struct DdpStatistics {
  int64_t iterations = 0;             ///< Forward passes outside of no_sync.
  int64_t parameters = 0;             ///< Elements that get a gradient.
  std::vector<int64_t> bucket_bytes;  ///< As they are now; empty where no communication is needed.
  bool buckets_rebuilt = false;       ///< In the order in which gradients came; from step 2 on.
};

namespace detail {

class GradientReducer;
struct ModuleState;
struct ReducedParameter;
using ReducerFactory =
    std::function<std::unique_ptr<GradientReducer>(const std::vector<ReducedParameter>&)>;

/// The part of DistributedDataParallel that does not depend on the module's type, and all of
/// GradientAverager.
class DdpCore : public Joinable {
 public:
  virtual void before_forward() = 0;
  virtual void after_forward() = 0;
  /// Rank 0's buffers, for all. A collective.
  virtual void share_buffers() = 0;
  virtual DdpStatistics statistics() const = 0;
  /// Whether the next backward averages gradients.
  bool& synchronizing() { return synchronizing_; }
  /// The last forward's gradients are not averaged: it was within no_sync.
  bool adding_up() const { return adding_up_; }
  const ProcessGroup& group() const { return group_; }
  const ProcessGroup& join_process_group() const override { return group_; }

 protected:
  explicit DdpCore(ProcessGroup group) : group_(std::move(group)) {}

  const ProcessGroup group_;
  bool synchronizing_ = true;
  bool adding_up_ = false;
};

/// `make_reducer` in place of the options' choice of a reducer. `what` names the caller in
/// messages.
std::unique_ptr<DdpCore> make_ddp_core(torch::nn::Module& module, const ProcessGroup& group,
                                       const DdpOptions& options,
                                       const ReducerFactory& make_reducer = {},
                                       const std::string& what = "DistributedDataParallel");
/// Without a wrapper: no forward tells of itself, and each backward averages. `module` must keep
/// its number of parameters; null where it is not known.
std::unique_ptr<DdpCore> make_averager_core(const ModuleState& state, const ProcessGroup& group,
                                            const DdpOptions& options, const std::string& what,
                                            const torch::nn::Module* module);

}  // namespace detail

/// Data parallelism over processes, as torch.nn.parallel.DistributedDataParallel. Every rank has
/// the whole model and a share of each batch. Gradients are averaged over ranks while backward runs
/// (Li et al., "PyTorch Distributed", VLDB 2020).
///
/// `ModulePtr` is a std::shared_ptr of a module or a torch ModuleHolder. Forward may take any
/// arguments and return anything.
///
/// In a backward of distributed autograd (rpc::AutogradContext) the gradients of that context are
/// averaged, and grad() is left alone.
///
/// The constructor checks that all ranks have the same parameters (MismatchError on every rank,
/// naming the first that differs). It broadcasts rank 0's parameters and buffers. The wrapper
/// works on the module's own parameters: give those to the optimizer. Throws UsageError when no
/// parameter needs a gradient.
///
/// What becomes of the parameters later is seen at the next forward. Values may be put in
/// (torch::load, set_data: they are not broadcast), and layers may be frozen or unfrozen, on all
/// ranks alike (MismatchError else). Then the buckets are made anew, which is a collective; with a
/// hook of the user's own it is a UsageError that names a parameter. So is another dtype or shape.
/// Adding or removing parameters is a UsageError, noticed at the first forward and every 100th.
///
/// After the 2nd, 10th, 100th, ... step, in the next forward, the ranks compare hashes of their
/// parameters. A difference is a MismatchError on every rank, which names the first parameter that
/// differs and the ranks: weights that one rank has loaded, another learning rate, a step that a
/// rank left out. For another moment there is World::check_equal.
///
/// A backward before the first forward of the wrapper is a UsageError: the module's own forward was
/// left in its place. Later such passes are legal, as a GAN makes of its discriminator. Their
/// gradients are not averaged, unless forwards whose backward has not come are left.
///
/// Each backward is averaged: of several forwards, one after the other or in one, several of one
/// forward (retain_graph), and a gradient penalty. A layer that `checkpoint` runs several times in
/// a backward needs `static_graph`: a UsageError names it else.
///
/// Every rank must make the same calls. Forward broadcasts buffers also in evaluation: call the
/// module itself to evaluate on one rank. A parameter that got no gradient in a backward makes the
/// next forward throw UsageError naming it, unless `find_unused_parameters` or `static_graph` is
/// set. A sparse one that no rank uses then gets an empty gradient. A backward must reach one
/// parameter at least on every rank, else the others wait for it until the time-out. A group of one
/// rank without a hook communicates nothing and so does not notice. Failures between ranks leave
/// backward as CommError. Where ranks have different numbers of inputs, see `Join`.
///
/// Random numbers stay each rank's own. Unseeded ranks draw other data each. Ranks seeded alike
/// draw the same noise and dropout: `rank_generator` (lockstep/launch) gives each its own numbers.
///
/// Reset gradients with `zero_grad(parameters)` of lockstep/optim, or with the zero_grad of
/// torch::optim or of the module. One thread at a time. Keep the process group alive as long as
/// this.
template <class ModulePtr>
class DistributedDataParallel : public WrappedModule<ModulePtr, detail::DdpCore> {
 public:
  DistributedDataParallel(ModulePtr module, const ProcessGroup& group,
                          const DdpOptions& options = {})
      : WrappedModule<ModulePtr, detail::DdpCore>(module,
                                                  detail::make_ddp_core(*module, group, options)) {}

  /// Whether the last forward was within no_sync, so that its gradients only add up.
  bool adding_up() const { return this->core_->adding_up(); }

  /// For `Join join({ddp, ...})`.
  operator Joinable&() {  // NOLINT(google-explicit-constructor)
    return *this->core_;
  }
};

}  // namespace lockstep
