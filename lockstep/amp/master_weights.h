#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/optim/optim.h"

namespace lockstep {

/// An optimizer of 16-bit parameters that keeps a float32 copy of each: the master weights of
/// Micikevicius et al. 2018 (Apex's O2). Without them an update that is small relative to its
/// weight would be lost in rounding. A step converts the gradients to float32 and divides them by
/// their scale. It then steps the copies with the inner optimizer, and rounds them into the
/// parameters. Parameters of other dtypes (batch norm's in float32) have no copy: the inner
/// optimizer steps them directly.
///
/// If other code has changed an element of a parameter since the last step (loaded weights, a
/// broadcast, averaging), the element replaces its copy. Any way of writing is noticed: a step
/// first compares all elements with what it rounded into them.
class MasterWeights : public Optimizer {
 public:
  using Factory = std::function<std::unique_ptr<Optimizer>(std::vector<at::Tensor> parameters)>;

  /// `make` gets the copies, and the parameters that have no copy, in the order of `parameters`.
  MasterWeights(std::vector<at::Tensor> parameters, const Factory& make);

  void step() override { step_scaled({}); }
  void step_scaled(const StepScale& scale) override;
  void set_lr(double lr) override { inner_->set_lr(lr); }
  double lr() const override { return inner_->lr(); }
  const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  bool takes_grad_scale() const override { return true; }
  /// The inner optimizer's state, in float32, and the copies as "master_param.INDEX".
  StateDict state() const override;
  /// Loads the copies and rounds them into the parameters. A state without copies, from a run in
  /// float32, leaves the parameters unchanged, and the copies are made from them.
  void load_state(const StateDict& state) override;
  const std::string& name() const override { return inner_->name(); }
  bool is_elementwise() const override { return inner_->is_elementwise(); }

  /// The tensors that are stepped: the copies, and the parameters that have no copy.
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
