#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/comm/tensor_shard.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/strategy_options.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

/// One batch of a step, as its owner (a step loop, a user's own loop) hands it to a strategy.
struct BatchWork {
  /// Runs the module on the batch and gives the scalar from which backward starts: the loss,
  /// already divided for accumulation and scaled for mixed precision. Called once, on the calling
  /// thread, with gradients on. Any module with any inputs and outputs can be trained so.
  std::function<at::Tensor()> loss;
  /// What `loss` is made of, for strategies that cut a batch along dimension 0 into micro-batches.
  /// Those need all three, and call `criterion` in place of `loss`.
  at::Tensor input = {};
  at::Tensor target = {};
  /// The mean over the samples that it is given, divided and scaled as `loss`.
  std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)> criterion = {};
  /// False while gradients only add up: ranks need not communicate them yet. With logical shards:
  /// while further batches of the shard are to come.
  bool last_of_step = true;
  struct Shard {
    int64_t step;   ///< Counted over the whole run.
    int64_t index;  ///< Among all shards.
  };
  /// Of which shard the batch is; only with StrategyOptions::logical_shards.
  std::optional<Shard> shard = {};
};

/// A module as a chain: the output of one layer is the input of the next. For strategies that put
/// parts of it on different ranks or devices.
struct Layer {
  std::string name;                           ///< As it starts the names of its parameters.
  std::shared_ptr<torch::nn::Module> module;  ///< Null for a layer without tensors (ReLU, reshape).
  std::function<at::Tensor(const at::Tensor&)> forward;
};

/// Which of `size` different parts of the data a rank trains on. Ranks of one pipeline share one.
struct DataShare {
  int rank = 0;
  int size = 1;
  /// How many, from `rank` on: with logical shards those of this rank, else one.
  int count = 1;
};

/// Bytes that a rank keeps for training, as they are now. Activations are not counted.
struct StateBytes {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer = 0;
  int64_t total() const { return parameters + gradients + optimizer; }
};

/// What a strategy is made of. The module's parameters lie on `device` and have their values; those
/// of rank 0 win.
struct StrategySetup {
  std::shared_ptr<torch::nn::Module> module;
  std::vector<Layer> layers = {};  ///< Empty: the module is not known as a chain.
  /// Runs `module`, or a copy that `module->clone` made, on a batch. For strategies that keep
  /// copies. Empty: these refuse the module.
  std::function<at::Tensor(torch::nn::Module& module, const at::Tensor& input)> forward = {};
  /// Gives a batch of the shape that will come, of any values. Pipeline: rank 0 calls it once, and
  /// measures with it what layers cost, to cut stages of equal cost. Empty, or an undefined tensor:
  /// the cost is guessed from the layers' parameters.
  std::function<at::Tensor()> example_input = {};
  OptimizerFactory make_optimizer;
  ProcessGroup group;  ///< All ranks that train together.
  /// For zero1, zero2 and fsdp: the ranks of `group` among which the model is cut, and those that
  /// have the same parts of it in other replicas. Null: `group`, and none. make_strategy takes both
  /// from the mesh.
  ProcessGroup shard_group = {};
  ProcessGroup replicate_group = {};
  c10::Device device = c10::kCPU;
  StrategyOptions options = {};
};

/// How a model is spread over ranks: everything between a module, an optimizer and a group. A step
/// loop, or a user's own loop, sees this interface and no strategy by name:
///
///     for (...) {
///       strategy->run_batch({.loss = [&] { return loss_of(model->forward(x), y); }});
///       strategy->clip_grad_norm(1.0);
///       strategy->step();
///       strategy->zero_grad();
///     }
///
/// Every rank makes the same calls in the same order. Failures between ranks are CommErrors. One
/// thread at a time. Destroy it before the World closes.
class Strategy {
 public:
  virtual ~Strategy() = default;
  /// "ddp", "zero1", ...
  virtual const std::string& name() const = 0;
  virtual const ProcessGroup& group() const = 0;
  virtual DataShare data_share() const = 0;

  /// Forward and backward of one batch. Gradients add to those that are there. After the batch that
  /// is the last of its step they are the mean over all data shares.
  virtual void run_batch(const BatchWork& work) = 0;
  /// The module's output for a batch, without a graph. `forward` runs the module, `input` is for
  /// strategies that run it in parts. None on a rank that another rank answers for: sums over
  /// outputs, reduced over `group`, count each sample once.
  virtual std::optional<at::Tensor> predict(const std::function<at::Tensor()>& forward,
                                            const at::Tensor& input) = 0;
  /// Before an evaluation: gives all ranks that have a buffer the same one (rank 0's, as
  /// DistributedDataParallel does before each forward). A collective.
  virtual void share_buffers() {}
  /// Runs what makes a resumed run go on with the same bits, such as the order of buckets. The work
  /// is of zeros. Gradients are dropped. Changes buffers and random numbers.
  virtual void warm_up(const BatchWork& work) {}

  /// The gradients that `step` uses on this rank, after a step's last batch: whole ones or shards.
  /// The tensors may be changed in place.
  virtual std::vector<at::Tensor> gradients() const = 0;
  /// Whether ranks have different gradients, so that what is found in them (an infinity, a norm)
  /// must be reduced over `group`.
  virtual bool has_sharded_gradients() const = 0;
  /// As lockstep::clip_grad_norm over the gradients of the whole model. The norm before, on all
  /// ranks. A collective where gradients are sharded.
  virtual double clip_grad_norm(double max_norm) = 0;

  /// Updates the parameters, on all ranks to the same values. Throws UsageError while gradients
  /// only add up.
  virtual void step(const StepScale& scale = {}) = 0;
  /// Whether the optimizer evaluates the loss several times (lbfgs): then call `step_with` in place
  /// of `step`. Strategies that cannot have such an optimizer refuse it when they are made.
  virtual bool needs_closure() const { return false; }
  /// The same with a closure: it calls zero_grad and run_batch, and gives the loss of this rank's
  /// batch. The first call in a step may give the loss of the gradients that are there. The
  /// optimizer sees the mean over the ranks, so all ranks go the same way. Gives the first loss.
  virtual double step_with(const LossClosure& closure) {
    const double loss = closure();
    step();
    return loss;
  }
  virtual void zero_grad() = 0;
  virtual void set_lr(double lr) = 0;
  virtual double lr() const = 0;

  /// The whole model's parameters and buffers by the module's names, and the whole optimizer's
  /// state by "NAME.parameter-index" (see Optimizer::state), whatever a rank has of them: so a
  /// state saved with one strategy is loaded with another. On rank 0, on the CPU or the device;
  /// empty on the others. Collectives.
  virtual StateDict model_state() = 0;
  virtual StateDict optimizer_state() = 0;
  /// The same states, whole, on every rank. Throws CheckpointError where they do not fit.
  virtual void load_model_state(const StateDict& state) = 0;
  virtual void load_optimizer_state(const StateDict& state) = 0;

  /// The same states in parts: what this rank has, for a checkpoint that all ranks write. What
  /// several ranks have alike each gives. Optimizer state of a parameter has the parameter's sizes,
  /// or is one number. The tensors are the model's and the optimizer's own. Collectives.
  virtual std::vector<TensorShard> model_shards() { return whole_shards(model_state()); }
  virtual std::vector<TensorShard> optimizer_shards() { return whole_shards(optimizer_state()); }
  /// What the load functions look at on this rank: boxes of a tensor of the model, by its name, and
  /// of an optimizer's state, by the parameter's index. What is not named is needed whole.
  virtual std::map<std::string, std::vector<TensorBox>> needed_of_model() { return {}; }
  virtual std::map<size_t, std::vector<TensorBox>> needed_of_optimizer() { return {}; }

  /// Throws MismatchError on every rank where ranks differ in parameters that each has whole,
  /// naming the first and the ranks. Strategies that have none, or StrategyOptions::check_drift
  /// false, check nothing. A collective.
  virtual void check_equal() {}

  virtual StateBytes state_bytes() const = 0;
};

}  // namespace lockstep
