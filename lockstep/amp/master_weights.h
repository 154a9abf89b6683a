#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/optim/optim.h"

namespace lockstep {

/// An optimizer of parameters in 16 bits that keeps a float32 copy of each, the master weights of
/// Micikevicius et al. 2018 (Apex's O2). An update that is small against its weight would be lost
/// in 16 bits. A step turns the gradients into float32, divides them by their scale there, steps
/// the copies with the optimizer inside, and rounds them into the parameters. Parameters of other
/// dtypes (batch norm's in float32) are the inner optimizer's own.
///
/// A parameter's element that somebody else has changed since the last step (loaded weights, a
/// broadcast, averaging) wins over its copy, however it was written: a step first compares all
/// elements with what it rounded into them.
class MasterWeights : public Optimizer {
 public:
  using Factory = std::function<std::unique_ptr<Optimizer>(std::vector<at::Tensor> parameters)>;

  /// `make` gets the copies, and those parameters that have none, in the order of `parameters`.
  MasterWeights(std::vector<at::Tensor> parameters, const Factory& make);

  void step() override { step_scaled({}); }
  void step_scaled(const StepScale& scale) override;
  void set_lr(double lr) override { inner_->set_lr(lr); }
  double lr() const override { return inner_->lr(); }
  const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  bool takes_grad_scale() const override { return true; }
  /// The inner optimizer's, in float32, and the copies as "master_param.INDEX".
  OptimizerState state() const override;
  /// Rounds the copies into the parameters. A state without copies, of a run in float32, leaves the
  /// parameters as they are and takes the copies from them.
  void load_state(const OptimizerState& state) override;
  const std::string& name() const override { return inner_->name(); }
  bool is_elementwise() const override { return inner_->is_elementwise(); }

  /// The float32 tensors that are stepped: copies, and parameters that have none.
  const std::vector<at::Tensor>& master_parameters() const { return masters_; }

 private:
  bool has_copy(size_t index) const;
  void adopt_changes() const;
  void round_into_parameters();

  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> masters_;
  std::unique_ptr<Optimizer> inner_;
};

}  // namespace lockstep
