#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/optim/optim.h"

namespace lockstep {

/// Averages parameters over ranks periodically, instead of gradients in every step: local SGD. Call
/// it after each step of the optimizer. The classes, formulas and bits are those of
/// torch.distributed.algorithms.model_averaging. Use it from one thread. Every rank makes the same
/// calls.
class ModelAverager {
 public:
  virtual ~ModelAverager() = default;
  /// Averages if this step is due, and counts the step. Only parameters that have a gradient are
  /// averaged: call before zero_grad.
  virtual void average_parameters(const std::vector<at::Tensor>& parameters) = 0;

  /// Steps counted so far. Set it when a run resumes.
  int64_t step() const { return step_; }
  void set_step(int64_t step) { step_ = step; }

 protected:
  int64_t step_ = 0;
};

/// After `warmup_steps`, every `period`-th step over the whole group: steps warmup_steps,
/// warmup_steps + period, and so on, counted from 0.
class PeriodicModelAverager : public ModelAverager {
 public:
  /// Throws UsageError for a period below 1 and negative warm-up.
  PeriodicModelAverager(int64_t period, int64_t warmup_steps, ProcessGroup group);
  void average_parameters(const std::vector<at::Tensor>& parameters) override;

 private:
  int64_t period_;
  int64_t warmup_steps_;
  ProcessGroup group_;
};

/// Groups of several sizes, each with a period: {{4, 8}, {16, 16}} averages among each 8 ranks
/// every 4 steps, and among all 16 every 16 steps. In a step whose number several periods divide
/// only the largest one's groups average. Ranks that follow each other form a group. (Lin et al.,
/// "Don't Use Large Mini-Batches, Use Local SGD", 2018; Wang et al., "Hierarchical SGD", 2020.)
class HierarchicalModelAverager : public ModelAverager {
 public:
  /// {period, size of its groups}, ascending; the last size is the group's. A collective: makes the
  /// groups. Throws UsageError for an empty list, periods below 1 or not ascending, sizes that do
  /// not divide the group, a last one that is not all of it, and negative warm-up.
  HierarchicalModelAverager(std::vector<std::pair<int64_t, int>> period_group_sizes,
                            int64_t warmup_steps, const ProcessGroup& group);
  void average_parameters(const std::vector<at::Tensor>& parameters) override;

 private:
  struct Level {
    int64_t period;
    ProcessGroup group;
  };
  std::vector<Level> levels_;
  int64_t warmup_steps_;
};

/// Divides the group into subgroups of `size` consecutive ranks, as
/// torch.distributed.new_subgroups, and returns this rank's. A collective. Throws UsageError where
/// `size` does not divide the group.
ProcessGroup new_subgroups(const ProcessGroup& group, int size);
/// Divides the group by hosts and returns this host's subgroup. A collective.
ProcessGroup new_subgroup_of_host(const ProcessGroup& group);

/// Replaces each parameter by its mean over the group's ranks, with one all-reduce of all of them
/// in one flat tensor. The names and bits of
/// torch.distributed.algorithms.model_averaging.utils.average_parameters: each rank divides by the
/// group's size first. Needs memory for one more copy of the parameters. Parameters of several
/// dtypes are averaged in the widest. The parameters keep their memory. A collective; on a rank
/// that is not in the group (a null handle) nothing happens.
void average_parameters(const std::vector<at::Tensor>& parameters, const ProcessGroup& group);

/// Those that have a gradient.
std::vector<at::Tensor> get_params_to_average(const std::vector<at::Tensor>& parameters);

/// An optimizer whose steps are followed by an averager's, as
/// torch.distributed.optim.PostLocalSGDOptimizer. Together with post_local_sgd_hook it runs
/// post-local SGD (Lin et al., 2018): gradients are averaged over all ranks at first, and over the
/// ranks of a host later, while parameters are averaged over all ranks every now and then.
///
///     auto state = std::make_shared<PostLocalSGDState>(group, subgroup, 100);
///     auto hook = post_local_sgd_hook(state);
///     DistributedDataParallel ddp(model, group, {.async_custom_hook = hook});
///     auto sgd = make_optimizer("sgd", model->parameters(), {.lr = 0.01});
///     auto averager = std::make_shared<PeriodicModelAverager>(4, 100, group);
///     PostLocalSGDOptimizer optimizer(std::move(sgd), model->parameters(), averager);
///
/// `state()` is the optimizer's, and "averager_step.0", so that a resumed run does not warm up
/// again. A state without it is taken with a warning: the averager's count is then 0.
class PostLocalSGDOptimizer : public Optimizer {
 public:
  /// `parameters` are averaged; usually they are the optimizer's. Throws UsageError for nulls.
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
  StateDict state() const override;
  void load_state(const StateDict& state) override;
  const std::string& name() const override { return optimizer_->name(); }

 private:
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<at::Tensor> parameters_;
  std::shared_ptr<ModelAverager> averager_;
};

}  // namespace lockstep
