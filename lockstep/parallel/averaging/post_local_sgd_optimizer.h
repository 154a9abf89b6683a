#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/optim/optim.h"
#include "lockstep/parallel/averaging/averagers.h"

namespace lockstep {

/// An optimizer whose steps are followed by an averager's, as
/// torch.distributed.optim.PostLocalSGDOptimizer. Together with post_local_sgd_hook it runs
/// post-local SGD (Lin et al., 2018): gradients are averaged over all ranks at first, and over the
/// ranks of a host later, while parameters are averaged over all ranks every now and then.
///
///     auto state = std::make_shared<PostLocalSGDState>(group, subgroup, 100);
///     DistributedDataParallel ddp(model, group, {.async_custom_hook =
///     post_local_sgd_hook(state)}); PostLocalSGDOptimizer optimizer(make_optimizer("sgd",
///     model->parameters(), {.lr = 0.01}),
///                                     model->parameters(),
///                                     std::make_shared<PeriodicModelAverager>(4, 100, group));
///
/// `state()` is the optimizer's, and "averager_step.0", so that a resumed run does not warm up
/// again. A state without it is taken with a warning: the averager's count is then 0.
class PostLocalSGDOptimizer : public Optimizer {
 public:
  /// `parameters` are those that are averaged, mostly the optimizer's. Throws UsageError for nulls.
  PostLocalSGDOptimizer(std::unique_ptr<Optimizer> optimizer, std::vector<at::Tensor> parameters,
                        std::shared_ptr<ModelAverager> averager);

  /// A collective in the steps in which the averager averages.
  void step() override;
  /// A step that is skipped for an infinite gradient is counted and averaged all the same: the
  /// ranks need not agree on what they skip.
  void step_scaled(const StepScale& scale) override;
  void set_lr(double lr) override { optimizer_->set_lr(lr); }
  double lr() const override { return optimizer_->lr(); }
  const std::vector<at::Tensor>& parameters() const override { return optimizer_->parameters(); }
  bool takes_grad_scale() const override { return optimizer_->takes_grad_scale(); }
  OptimizerState state() const override;
  void load_state(const OptimizerState& state) override;
  const std::string& name() const override { return optimizer_->name(); }

 private:
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<at::Tensor> parameters_;
  std::shared_ptr<ModelAverager> averager_;
};

}  // namespace lockstep
