#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/parallel/ddp.h"
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
  void set_lr(double lr) override { optimizer().set_lr(lr); }
  double lr() const override { return optimizer().lr(); }

 protected:
  /// Throws UsageError for a null group or module.
  BaseStrategy(std::string name, const StrategySetup& setup);
  virtual Optimizer& optimizer() const = 0;
  virtual void update(const StepScale& scale);
  /// `forward` in the forward's context, which backward is not to run in.
  at::Tensor in_context(const std::function<at::Tensor()>& forward) const;
  /// For a step: throws UsageError while gradients only add up.
  void expect_last_of_step() const;

  bool checks_drift_;
  bool adding_up_ = false;  ///< The gradients of the last batch were not averaged.

 private:
  std::string name_;
  ProcessGroup group_;
  int64_t steps_ = 0;
  ForwardContext forward_context_;
};

/// What strategies share in which ranks have parts of the model and of one optimizer's state.
class SpreadStrategy : public BaseStrategy {
 public:
  using BaseStrategy::BaseStrategy;

  bool has_sharded_gradients() const override { return true; }
  StateDict model_state() override;
  StateDict optimizer_state() override;
  std::vector<TensorShard> model_shards() override;
  std::vector<TensorShard> optimizer_shards() override;
  std::map<std::string, std::vector<TensorBox>> needed_of_model() override;
  std::map<size_t, std::vector<TensorBox>> needed_of_optimizer() override;

 protected:
  virtual SpreadModel spread_model() = 0;
  virtual const SpreadOptimizer& spread_optimizer() const = 0;
  /// False where ranks of another replica give the same states.
  virtual bool gives_states() const { return true; }
};

/// What strategies share in which each rank has the whole module and runs it.
class WholeModelStrategy : public BaseStrategy {
 public:
  WholeModelStrategy(std::string name, const StrategySetup& setup);

  void run_batch(const BatchWork& work) override;
  void warm_up(const BatchWork& work) override;
  void share_buffers() override;
  std::vector<at::Tensor> gradients() const override;
  bool has_sharded_gradients() const override { return false; }
  double clip_grad_norm(double max_norm) override;
  void zero_grad() override;
  StateDict model_state() override;
  std::vector<TensorShard> model_shards() override;
  void load_model_state(const StateDict& state) override;
  void check_equal() override;
  /// From now on backward averages gradients over the ranks, where there are several. A collective.
  void average_gradients(const DdpOptions& options, const ReducerFactory& make_reducer = {});

 protected:
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  /// Lets go of the reducer. For a strategy whose own members a reducer uses.
  void drop_reducer() { core_.reset(); }
  at::Tensor compute_loss(const BatchWork& work);

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::vector<at::Tensor> parameters_;  ///< In the module's order, each once, as in Python.
  std::unique_ptr<DdpCore> core_;
};

/// What those share in which each rank also has the whole optimizer.
class WholeOptimizerStrategy : public WholeModelStrategy {
 public:
  WholeOptimizerStrategy(std::string name, const StrategySetup& setup);

  bool needs_closure() const override { return optimizer_->needs_closure(); }
  double step_with(const LossClosure& closure) override;
  StateDict optimizer_state() override;
  std::vector<TensorShard> optimizer_shards() override { return whole_shards(optimizer_->state()); }
  void load_optimizer_state(const StateDict& state) override { optimizer_->load_state(state); }
  StateBytes state_bytes() const override;

 protected:
  Optimizer& optimizer() const override { return *optimizer_; }

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
double clip_shards(const std::vector<at::Tensor>& gradients, double max_norm,
                   const ProcessGroup& group);

int64_t bytes_of(const at::Tensor& tensor);
int64_t bytes_of(const std::vector<at::Tensor>& tensors);
int64_t bytes_of(const StateDict& state);

}  // namespace lockstep::detail

namespace lockstep {

/// Every rank has the whole model and the whole optimizer: DistributedDataParallel. A group of one
/// does without, to the same bits.
std::unique_ptr<Strategy> make_ddp_strategy(const StrategySetup& setup,
                                            const DdpOptions& options = {});

}  // namespace lockstep
