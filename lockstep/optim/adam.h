#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/optim/optim.h"

namespace lockstep {

/// Adam and AdamW through LibTorch's fused kernels: one pass over parameter, gradient and state in
/// place of about twelve. The bits are those of Python's torch.optim.Adam(fused=True). One step
/// differs from Python's default, because the operations round in another order. The difference is
/// a few units in the last place of the larger of parameter and update. The bits do not depend on
/// the number of threads. State has the names and shapes of torch::optim's (see
/// make_torch_optimizer). So either loads what the other saved.
class FusedAdam : public Optimizer {
 public:
  /// float32, float64 or bfloat16, dense (contiguous, or channels-last and the like), on the CPU or
  /// a CUDA device.
  static bool takes(const std::vector<at::Tensor>& parameters);

  /// `name` is adam or adamw. `takes(parameters)` must hold.
  FusedAdam(std::string name, std::vector<at::Tensor> parameters, const OptimizerOptions& options);

  /// Throws UsageError for a sparse gradient, as torch::optim does.
  void step() override { step_scaled({}); }
  void step_scaled(const StepScale& scale) override;
  void set_lr(double lr) override { lr_ = lr; }
  double lr() const override { return lr_; }
  const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  bool takes_grad_scale() const override { return true; }
  StateDict state() const override;
  void load_state(const StateDict& state) override;
  const std::string& name() const override { return name_; }
  bool is_elementwise() const override { return true; }

 private:
  /// Of one parameter. Undefined tensors until its first gradient. In the parameter's layout.
  struct Moments {
    /// One number: int64 on the CPU; float32 on a CUDA device, as its kernel wants it.
    at::Tensor step;
    at::Tensor exp_avg;
    at::Tensor exp_avg_sq;
    at::Tensor max_exp_avg_sq;  ///< With amsgrad.
  };
  /// What one call of a kernel takes: parameters of one device and dtype.
  struct Group {
    std::vector<size_t> members;
    /// Of one step; kept so that a step allocates nothing.
    std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps;
    void clear();
  };

  Moments fresh_moments(size_t index) const;
  void add_to(Group& group, size_t index);
  void run(Group& group, const StepScale& scale);

  std::string name_;
  std::vector<at::Tensor> parameters_;
  std::vector<Moments> moments_;
  std::vector<Group> groups_;
  double lr_;
  double beta1_;
  double beta2_;
  double eps_;
  double weight_decay_;
  bool amsgrad_;
};

}  // namespace lockstep
