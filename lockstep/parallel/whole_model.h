#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::detail {

/// What strategies share in which each rank has the whole module and runs it.
class WholeModelStrategy : public Strategy {
 public:
  explicit WholeModelStrategy(const StrategySetup& setup);

  const ProcessGroup& group() const override { return group_; }
  DataShare data_share() const override { return {group_.rank(), group_.size()}; }
  void run_batch(const BatchWork& work) override;
  void warm_up(const BatchWork& work) override;
  std::optional<at::Tensor> predict(const std::function<at::Tensor()>& forward,
                                    const at::Tensor& input) override;
  void share_buffers() override;
  std::vector<at::Tensor> gradients() const override;
  bool has_sharded_gradients() const override { return false; }
  double clip_grad_norm(double max_norm) override;
  void zero_grad() override;
  StateDict model_state() override;
  void load_model_state(const StateDict& state) override;

 protected:
  torch::nn::Module& module() { return *module_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  /// From now on backward averages gradients over the ranks, where there are several. A collective.
  void average_gradients(const DdpOptions& options, const ReducerFactory& make_reducer = {});
  /// Lets go of the reducer. For a strategy whose own members a reducer uses.
  void drop_reducer() { core_.reset(); }
  /// In the forward's context, which backward is not to run in.
  at::Tensor compute_loss(const BatchWork& work);
  /// For `step`: throws UsageError while gradients only add up.
  void expect_last_of_step() const;

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::vector<at::Tensor> parameters_;  ///< In the module's order, each once, as in Python.
  ProcessGroup group_;
  ForwardContext forward_context_;
  std::optional<DdpCore> core_;
  bool adding_up_ = false;  ///< The gradients of the last batch were not averaged.
};

/// What those share in which each rank also has the whole optimizer.
class WholeOptimizerStrategy : public WholeModelStrategy {
 public:
  explicit WholeOptimizerStrategy(const StrategySetup& setup);

  void step(const StepScale& scale) override;
  bool needs_closure() const override { return optimizer_->needs_closure(); }
  double step_with(const LossClosure& closure) override;
  void set_lr(double lr) override { optimizer_->set_lr(lr); }
  double lr() const override { return optimizer_->lr(); }
  StateDict optimizer_state() override;
  void load_optimizer_state(const StateDict& state) override { optimizer_->load_state(state); }
  StateBytes state_bytes() const override;

 private:
  std::unique_ptr<Optimizer> optimizer_;
};

/// Throws UsageError for an optimizer that needs a closure. `reason` says why `strategy` cannot
/// have one.
void refuse_closure(const Optimizer& optimizer, const std::string& strategy,
                    const std::string& reason);

int64_t bytes_of(const at::Tensor& tensor);
int64_t bytes_of(const std::vector<at::Tensor>& tensors);
int64_t bytes_of(const StateDict& state);

}  // namespace lockstep::detail
