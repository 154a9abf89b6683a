#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/gradient_reducer.h"
#include "lockstep/parallel/spread_state.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::detail {

/// What all strategies share: a name, a group, and the step of one optimizer.
class BaseStrategy : public Strategy {
 public:
  const std::string& name() const override { return name_; }
  const ProcessGroup& group() const override { return group_; }
  DataShare data_share() const override { return {group_.rank(), group_.size()}; }
  std::optional<at::Tensor> predict(const std::function<at::Tensor()>& forward,
                                    const at::Tensor& input) override;
  void step(const StepScale& scale) final;
  /// The optimizer's part of a step, without the comparison of ranks.
  virtual void update(const StepScale& scale);
  void set_lr(double lr) override { optimizer().set_lr(lr); }
  double lr() const override { return optimizer().lr(); }
  virtual Optimizer& optimizer() const = 0;

  /// Which parts this rank has of the module's tensors and of the optimizer's state. All states are
  /// read and taken by these. Collectives where a strategy says so.
  virtual SpreadModel spread_model() = 0;
  virtual SpreadOptimizer spread_optimizer() = 0;
  StateDict model_state() override;
  StateDict optimizer_state() override;
  std::vector<TensorShard> model_shards() override { return spread_model().shards(); }
  std::vector<TensorShard> optimizer_shards() override {
    return spread_optimizer().shards(optimizer().state());
  }
  std::map<std::string, std::vector<TensorBox>> needed_of_model() override {
    return spread_model().needed();
  }
  std::map<size_t, std::vector<TensorBox>> needed_of_optimizer() override {
    return spread_optimizer().needed();
  }
  void load_model_state(const StateDict& state) override {
    spread_model().load(state, "the checkpoint's model.safetensors");
  }

 protected:
  /// Throws UsageError for a null group or module.
  BaseStrategy(std::string name, const StrategySetup& setup);
  /// `forward` in the forward's context, which backward is not to run in.
  at::Tensor in_context(const std::function<at::Tensor()>& forward) const;
  /// For a step: throws UsageError while gradients only add up.
  void expect_last_of_step() const;
  /// False on ranks that have the same parts as a rank of a lower number: of another replica.
  virtual bool gives_states() const { return true; }
  /// What ranks must have alike and no other comparison looks at, before some of the steps.
  virtual void compare_ranks();

  bool checks_drift_;
  bool adding_up_ = false;  ///< The gradients of the last batch were not averaged.

 private:
  std::string name_;
  ProcessGroup group_;
  int64_t steps_ = 0;
  ForwardContext forward_context_;
};

/// A row of the table of strategies: how parameters, gradients and the optimizer's state are placed
/// on the ranks that train on different data (`group`). By itself a row runs a batch at once. Under
/// a pipeline's schedule it is made for `micro_batches`: then their gradients add up in the
/// module's parameters, and it has no hooks in backward.
class RowStrategy : public BaseStrategy {
 public:
  using BaseStrategy::BaseStrategy;

  /// Around the schedule of a batch, which uses the module's parameters.
  virtual void begin_schedule() {}
  virtual void end_schedule() {}
  /// Averages over the ranks the gradients that have added up. A collective.
  virtual void reduce_accumulated() = 0;
  /// What the optimizer updates on this rank, by its own indices. Where gradients are sharded they
  /// are the gradients of these.
  virtual std::vector<at::Tensor> updated() const = 0;
};

/// Makes a row. A collective of `setup.group`.
using MakeRow = std::unique_ptr<RowStrategy> (*)(const StrategySetup& setup, bool micro_batches);
std::unique_ptr<RowStrategy> make_ddp_row(const StrategySetup& setup, bool micro_batches);

/// What strategies share in which each rank has the whole module and runs it.
class WholeModelStrategy : public RowStrategy {
 public:
  WholeModelStrategy(std::string name, const StrategySetup& setup);

  void run_batch(const BatchWork& work) override;
  void warm_up(const BatchWork& work) override;
  void share_buffers() override;
  std::vector<at::Tensor> gradients() const override;
  bool has_sharded_gradients() const override { return false; }
  double clip_grad_norm(double max_norm) override;
  void zero_grad() override;
  void reduce_accumulated() override;
  std::vector<at::Tensor> updated() const override { return parameters_; }
  SpreadModel spread_model() override;
  void check_equal() override;
  /// From now on backward averages gradients over the ranks, where there are several, or, for
  /// `micro_batches`, reduce_accumulated does. A collective.
  void average_gradients(const DdpOptions& options, bool micro_batches = false,
                         const ReducerFactory& make_reducer = {});

 protected:
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  /// Lets go of the reducer. For a strategy whose own members a reducer uses.
  void drop_reducer() {
    core_.reset();
    reducer_.reset();
  }
  at::Tensor compute_loss(const BatchWork& work);
  bool gives_states() const override { return group().rank() == 0; }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::vector<at::Tensor> parameters_;  ///< In the module's order, each once, as in Python.
  std::unique_ptr<DdpCore> core_;
  std::unique_ptr<GradientReducer> reducer_;  ///< Of reduce_accumulated.
};

/// What those share in which each rank also has the whole optimizer.
class WholeOptimizerStrategy : public WholeModelStrategy {
 public:
  WholeOptimizerStrategy(std::string name, const StrategySetup& setup);

  bool needs_closure() const override { return optimizer_->needs_closure(); }
  double step_with(const LossClosure& closure) override;
  Optimizer& optimizer() const override { return *optimizer_; }
  SpreadOptimizer spread_optimizer() override;
  /// State need not be like its parameter: lbfgs has vectors of all.
  std::vector<TensorShard> optimizer_shards() override { return whole_shards(optimizer_->state()); }
  std::map<size_t, std::vector<TensorBox>> needed_of_optimizer() override { return {}; }
  StateDict optimizer_state() override;
  void load_optimizer_state(const StateDict& state) override { optimizer_->load_state(state); }
  StateBytes state_bytes() const override;

 private:
  std::unique_ptr<Optimizer> optimizer_;
};

/// A step of the optimizer, by what a gradient scaler knows.
void step_by(Optimizer& optimizer, const StepScale& scale);

/// Throws UsageError for an optimizer that needs a closure. `reason` says why `strategy` cannot
/// have one.
void refuse_closure(const Optimizer& optimizer, const std::string& strategy,
                    const std::string& reason);

/// lockstep::clip_grad_norm where each rank of `group` has its own part of the model's gradients,
/// as shards of ZeRO or FSDP: dense, of any shapes and floating-point dtypes, or none. A gradient
/// must be on one rank only, or it counts several times. The norm is the same bits on all ranks. It
/// differs from that of one process by its rounding, as the sum over ranks is in float64. A
/// collective.
/// `counts`: which gradients count on this rank. Empty: all do.
double clip_shards(const std::vector<at::Tensor>& gradients, double max_norm,
                   const ProcessGroup& group, const std::vector<bool>& counts = {});

int64_t bytes_of(const at::Tensor& tensor);
int64_t bytes_of(const std::vector<at::Tensor>& tensors);
int64_t bytes_of(const StateDict& state);

}  // namespace lockstep::detail

namespace lockstep {

/// Every rank has the whole model and the whole optimizer: DistributedDataParallel with
/// `setup.options.ddp`. A group of one does without, to the same bits, but with a hook of the
/// user's own.
std::unique_ptr<Strategy> make_ddp_strategy(const StrategySetup& setup);

}  // namespace lockstep
