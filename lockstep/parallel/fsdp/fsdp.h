#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/device_mesh.h"
#include "lockstep/parallel/strategy.h"
#include "lockstep/parallel/wrapped_module.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

/// What a FullyShardedDataParallel is and has done so far.
struct FsdpStatistics {
  std::vector<std::string> units;      ///< Names of the modules that are units; "" is the whole.
  std::vector<int64_t> unit_elements;  ///< Of each, with what fills the last shard.
  bool shared_memory = false;          ///< Parameters lie once per host.
  int64_t gathers = 0;                 ///< Of a unit, so far.
  int64_t foretold_gathers = 0;        ///< Those that ran ahead.
  int64_t reductions = 0;              ///< Of a unit's gradients, so far.
};

namespace detail {

struct SpreadModel;
struct SpreadOptimizer;

/// The part of FullyShardedDataParallel that does not depend on the module's type.
class FsdpCore {
 public:
  virtual ~FsdpCore() = default;

  /// Throws UsageError when the backward before left parameters without a gradient.
  virtual void before_forward() = 0;
  /// Before parameters are used otherwise, such as in an evaluation. `after_forward` ends it.
  virtual void begin_use() = 0;
  /// `records`: a backward will follow. `of_program`: of a loop whose optimizer is not ours.
  virtual void after_forward(bool records, bool of_program = false) = 0;
  /// What a WrappedModule asks.
  void after_forward() { after_forward(c10::GradMode::is_enabled(), /*of_program=*/true); }
  /// After a forward that threw: throws what a gather in it threw, if one did. TorchScript's
  /// interpreter, and a user's own forward, may have made something else of it.
  virtual void rethrow_failure() = 0;
  /// The same error, and no gradient is kept.
  virtual void check_complete() = 0;
  /// Rank 0's buffers, for all. A collective.
  virtual void share_buffers() = 0;
  /// See RowStrategy.
  virtual void begin_schedule() = 0;
  virtual void end_schedule() = 0;
  virtual void reduce_accumulated() = 0;
  virtual bool& synchronizing() = 0;

  virtual const std::vector<at::Tensor>& shards() const = 0;
  virtual const ProcessGroup& group() const = 0;
  virtual double clip_grad_norm(double max_norm) = 0;

  virtual StateDict model_state() = 0;
  virtual void load_model_state(const StateDict& state, const std::string& source) = 0;
  virtual std::vector<TensorShard> sharded_state() const = 0;
  virtual void load_sharded_state(const std::vector<TensorShard>& given,
                                  const std::string& source) = 0;
  virtual StateDict optimizer_state(const StateDict& own) = 0;
  virtual StateDict own_optimizer_state(const StateDict& whole, const std::string& source) = 0;
  /// With values that were put into the module's parameters since. A collective.
  virtual SpreadModel spread_model() = 0;
  virtual const SpreadOptimizer& spread_optimizer() const = 0;

  virtual void begin_full(bool writable) = 0;
  virtual void end_full() = 0;

  virtual int64_t parameter_bytes() const = 0;
  virtual int64_t gradient_bytes() const = 0;
  virtual FsdpStatistics statistics() const = 0;
};

/// `replicate`: the ranks that have the same shards in other replicas; may be null.
std::unique_ptr<FsdpCore> make_fsdp_core(std::shared_ptr<torch::nn::Module> module,
                                         const ProcessGroup& group, const ProcessGroup& replicate,
                                         const FsdpOptions& options,
                                         std::optional<c10::Device> device);

}  // namespace detail

/// A model of which each rank keeps a part: of its parameters, their gradients and the optimizer's
/// state 1/N each (ZeRO-3, Rajbhandari et al. 2020; FSDP, Zhao et al. 2023). As
/// torch.distributed.fsdp, for any module and without a change to it:
///
///     FullyShardedDataParallel fsdp(model, world.group());
///     auto optimizer = make_optimizer("adam", fsdp.parameters(), {});   // The shards.
///     for (...) {
///       criterion(fsdp.forward(x), y).backward();
///       fsdp.clip_grad_norm(1.0);
///       optimizer->step();
///       zero_grad(fsdp.parameters());
///     }
///
/// **Units.** The module is cut into units, a transformer's blocks for example
/// (FsdpOptions::units). A unit's parameters are gathered when the first operation on one of them
/// runs, in forward and in backward, and freed when other units are used. So up to three units are
/// whole at a time. How operations are noticed says parallel/fsdp/watched_memory.h. Over shared
/// memory the whole parameters lie once per host instead, and nothing is gathered.
///
/// **Gradients.** When backward has all gradients of a unit, they are averaged over ranks by a
/// reduce-scatter. The module's own tensors never keep a gradient, outside of no_sync, which costs
/// the memory of all of them. An optimizer of the module's own parameters throws UsageError at its
/// first step. While they only add up, a step of the optimizer throws UsageError. A
/// backward of distributed autograd (rpc::AutogradContext) is a UsageError, too. So is a layer that
/// `checkpoint` runs several times in a backward: its unit is reduced after the first. Parameters
/// must be given to optimizers that treat every element alike (sgd, adam, adamw, rmsprop, adagrad).
///
/// **The module's parameters** keep their shapes. Reading one anywhere gathers its unit, so all
/// ranks must do it (TimeoutError or MismatchError otherwise). Writing to one throws UsageError:
/// use full_parameters(). A clone of the module is a whole, ordinary module. Evaluate with
/// gradients off (at::NoGradGuard), not between backward and step.
///
/// **Equal to what.** With the same batches parameters have the bits of DistributedDataParallel
/// with the same optimizer over shared memory, and with one or two ranks over every backend. Gloo
/// adds three ranks or more in an order that depends on the place in a buffer. Exceptions: clipping
/// (the norm is summed in another order), `reduce_dtype`, `parameter_dtype`, and accumulation
/// without no_sync, where each backward is reduced by itself.
///
/// The constructor checks that all ranks have the same module (MismatchError) and takes rank 0's
/// values. Failures between ranks are CommErrors. One thread at a time. Keep the process group, and
/// this, for as long as the module is used (UsageError otherwise). The module can be wrapped again,
/// also over another group. Parameters that were in shards are NaN then, until a state is loaded.
/// Adding, removing or freezing parameters
/// afterwards is not noticed.
template <class ModulePtr>
class FullyShardedDataParallel : public WrappedModule<ModulePtr, detail::FsdpCore> {
  using Base = WrappedModule<ModulePtr, detail::FsdpCore>;

 public:
  /// `device`: where the module computes. Unset: where its parameters are, or the CPU where they
  /// are deferred.
  FullyShardedDataParallel(ModulePtr module, const ProcessGroup& group,
                           const FsdpOptions& options = {}, std::optional<c10::Device> device = {})
      : Base(module,
             detail::make_fsdp_core(detail::module_pointer(module), group, {}, options, device)) {}
  /// The model is cut over the mesh's dimension dp_shard. Where there is dp_replicate its ranks
  /// have the same shards and average their gradients: hybrid sharding, as Python's HSDP. States
  /// are given on the first rank of each replica. Other dimensions are not looked at: their ranks
  /// have models of their own, as stages have.
  FullyShardedDataParallel(ModulePtr module, const DeviceMesh& mesh,
                           const FsdpOptions& options = {}, std::optional<c10::Device> device = {})
      : Base(module, detail::make_fsdp_core(
                         detail::module_pointer(module), mesh.get_group("dp_shard"),
                         mesh.has("dp_replicate") ? mesh.get_group("dp_replicate") : ProcessGroup(),
                         options, device)) {}

  /// What this rank's optimizer updates: its runs of each parameter that needs a gradient, as
  /// vectors. One without elements where it has none, as ranks are many and parameters few. Clip
  /// them by this class's clip_grad_norm: a function that gets them alone, such as
  /// lockstep::clip_grad_norm or torch's, takes this rank's part of the norm for the whole.
  const std::vector<at::Tensor>& parameters() const { return this->core_->shards(); }

  /// Scales the gradients of all shards so that the 2-norm of all is at most `max_norm`. Gives the
  /// norm before, the same on all ranks. A collective.
  double clip_grad_norm(double max_norm) { return this->core_->clip_grad_norm(max_norm); }

  /// While the guard lives, all of the module's parameters are whole. With `writable`, what was
  /// written to them is kept: all ranks must write the same. A collective, at both ends. Python's
  /// summon_full_params. The guard's end reports no failure; the group's next call does.
  class [[nodiscard]] FullParameters {
   public:
    FullParameters(detail::FsdpCore& core, bool writable) : core_(core) {
      core_.begin_full(writable);
    }
    ~FullParameters() {
      try {
        core_.end_full();
      } catch (...) {
      }
    }
    FullParameters(const FullParameters&) = delete;
    FullParameters& operator=(const FullParameters&) = delete;

   private:
    detail::FsdpCore& core_;
  };
  FullParameters full_parameters(bool writable = false) { return {*this->core_, writable}; }

  /// The whole module's parameters and buffers by the module's names, on the CPU of rank 0; empty
  /// on the others. A collective: a rank that does not come gives a TimeoutError that names it.
  StateDict full_state_dict() { return this->core_->model_state(); }
  /// Takes a whole state on every rank. Throws CheckpointError naming what does not fit.
  void load_full_state_dict(const StateDict& state) {
    this->core_->load_model_state(state, "the state");
  }
  /// What of the module this rank keeps: boxes of the parameters, and on rank 0 the buffers. The
  /// tensors are its own: copy what must outlive the next step. No collective.
  std::vector<TensorShard> sharded_state_dict() const { return this->core_->sharded_state(); }
  /// Takes what this rank needs of `given`: shards of all ranks of a run of any size, which
  /// together are the whole. Throws CheckpointError naming what is missing or does not fit.
  void load_sharded_state_dict(const std::vector<TensorShard>& given) {
    this->core_->load_sharded_state(given, "the sharded state");
  }
  /// The state of an optimizer of `parameters()`, as that of one of the whole module: by
  /// "NAME.parameter-index", where a parameter of several names counts once. On rank 0; empty on
  /// the others. A collective.
  StateDict full_optimizer_state(const StateDict& own) { return this->core_->optimizer_state(own); }
  /// This rank's part of such a state, for `load_state` of an optimizer of `parameters()`. What the
  /// state has of frozen parameters is kept here, for the next full_optimizer_state.
  StateDict own_optimizer_state(const StateDict& whole) {
    return this->core_->own_optimizer_state(whole, "the state");
  }
};

/// Parameters, gradients and the optimizer's state in shards: FullyShardedDataParallel with
/// `setup.options.fsdp`.
///
/// Each batch's gradients are reduced when its backward runs, also while they only add up: whole
/// gradients are never kept. So with several batches per step the sum has another order than with
/// ddp. With one batch per step the bits are those of ddp, as FullyShardedDataParallel says.
std::unique_ptr<Strategy> make_fsdp_strategy(const StrategySetup& setup);

namespace detail {

class RowStrategy;
std::unique_ptr<RowStrategy> make_fsdp_row(const StrategySetup& setup, bool micro_batches);

/// Operations that were noted instead of run.
class InitTape;

/// While it lives, this thread's operations give tensors without memory (device meta) and are
/// noted.
class RecordInit {
 public:
  RecordInit();
  ~RecordInit();
  RecordInit(const RecordInit&) = delete;
  RecordInit& operator=(const RecordInit&) = delete;
  /// Ties the tape to the tensors of a module made meanwhile.
  void attach(torch::nn::Module& module) const;

 private:
  std::shared_ptr<InitTape> tape_;
};

bool is_deferred(const at::Tensor& tensor);

/// Runs what was noted, in its order, on the CPU. `made` gets each tensor of the module that is
/// deferred, as soon as its values are complete, with these values. They are freed when it returns.
/// So little more than one of them is there at a time. Tensors that share memory come one after the
/// other. Throws UsageError for a tensor on the meta device of which nothing was noted.
void run_deferred(
    torch::nn::Module& module,
    const std::function<void(const at::Tensor& deferred, const at::Tensor& values)>& made);

}  // namespace detail

/// Makes a module that needs no memory until FullyShardedDataParallel (or the strategy fsdp) shards
/// it. So a model can be made that is larger than one rank's memory:
///
///     auto model = deferred_init([] { return std::make_shared<Gpt>(options); });
///     FullyShardedDataParallel fsdp(model, world.group());
///
/// `make` gives a std::shared_ptr of a module or a ModuleHolder. The operations in it are noted:
/// tensors are made on the meta device. FullyShardedDataParallel runs them, one parameter after the
/// other, on every rank, and keeps its shards of rank 0's values. They have the bits that `make`
/// would have given there: the random numbers are drawn then.
///
/// What `make` does with raw pointers or values (torch::tensor of a list, item(), loading a file)
/// cannot be noted and is LibTorch's error. Such a tensor can be made before, outside of it.
template <class Make>
auto deferred_init(Make&& make) {
  const detail::RecordInit record;
  auto module = std::forward<Make>(make)();
  record.attach(*module);
  return module;
}

}  // namespace lockstep
