#pragma once

#include <torch/optim/lbfgs.h>

#include <string>
#include <vector>

#include "lockstep/optim/optim.h"

namespace lockstep {

/// torch::optim::LBFGS behind our interface. It looks at all parameters as one vector, so its state
/// is one of the whole: each entry has the index 0, as Python keeps it with the first parameter.
/// A line search evaluates the loss up to 25 times, whatever max_iter. Python's, since
/// PyTorch 2.13, ends where the step has made 1.25 max_iter evaluations.
class Lbfgs final : public Optimizer {
 public:
  Lbfgs(std::vector<at::Tensor> parameters, const OptimizerOptions& options);

  /// Throws UsageError: `step_with` is the step.
  void step() override;
  void step_scaled(const StepScale& scale) override;
  bool needs_closure() const override { return true; }
  double step_with(const LossClosure& closure) override;
  void set_lr(double lr) override;
  double lr() const override;
  const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  StateDict state() const override;
  void load_state(const StateDict& state) override;
  const std::string& name() const override { return name_; }

 private:
  using State = torch::optim::LBFGSParamState;
  const State* own_state() const;

  std::string name_ = "lbfgs";
  std::vector<at::Tensor> parameters_;
  mutable torch::optim::LBFGS torch_;  ///< Its const access to state is not const all the way.
};

}  // namespace lockstep
