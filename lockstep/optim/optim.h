#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

struct OptimizerOptions {
  double lr = 0.01;
  double momentum = 0;      ///< sgd, rmsprop.
  double weight_decay = 0;  ///< L2 added to the gradient; decoupled for adamw.
  bool nesterov = false;    ///< sgd.
  double dampening = 0;     ///< sgd.
  double beta1 = 0.9;       ///< adam, adamw.
  double beta2 = 0.999;     ///< adam, adamw.
  double eps = 1e-8;        ///< adam, adamw, rmsprop (adagrad uses 1e-10, as PyTorch).
  double alpha = 0.99;      ///< rmsprop.
  bool amsgrad = false;     ///< adam, adamw.
  double lr_decay = 0;      ///< adagrad.
};

/// A step from gradients to parameters. One thread at a time.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  /// Updates every parameter that has a gradient.
  virtual void step() = 0;
  virtual void set_lr(double lr) = 0;
  virtual double lr() const = 0;
  /// Everything needed to go on with the same bits: tensors by "NAME.parameter-index" and scalars as
  /// one-element tensors.
  virtual std::vector<std::pair<std::string, at::Tensor>> state() const = 0;
  /// Throws CheckpointError naming what is missing or has another shape.
  virtual void load_state(const std::vector<std::pair<std::string, at::Tensor>>& state) = 0;
  virtual const std::string& name() const = 0;
};

/// sgd (our own, with the bits of torch.optim.SGD and fused kernels where those give them), adam,
/// adamw, rmsprop, adagrad (torch::optim's). Throws UsageError with the nearest name for an unknown
/// one.
std::unique_ptr<Optimizer> make_optimizer(const std::string& name,
                                          std::vector<at::Tensor> parameters,
                                          const OptimizerOptions& options);
std::vector<std::string> optimizer_names();

/// Drops all gradients without detaching them, so that views of DDP's buckets stay valid.
void zero_grad(const std::vector<at::Tensor>& parameters);

/// Scales the gradients so that their total 2-norm is at most `max_norm`; returns the norm before,
/// with the bits of torch.nn.utils.clip_grad_norm_.
double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm);

struct ScheduleOptions {
  std::string name = "constant";  ///< constant, step, cosine, linear.
  int64_t warmup_steps = 0;       ///< The rate grows linearly from lr/warmup_steps to lr.
  int64_t total_steps = 0;        ///< For cosine and linear: where the rate reaches `min_lr`.
  int64_t step_size = 0;          ///< For step: every so many steps the rate is multiplied by gamma.
  double gamma = 0.1;
  double min_lr = 0;
};

/// The learning rate at optimizer step `step` (from 0), for a base rate: a pure function, so that
/// resuming needs no state. Throws UsageError for an unknown name or missing lengths.
double scheduled_lr(const ScheduleOptions& options, double base_lr, int64_t step);
std::vector<std::string> schedule_names();

}  // namespace lockstep
