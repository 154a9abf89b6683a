#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "lockstep/optim/optim.h"

namespace lockstep {

/// Stochastic gradient descent with the bits of torch.optim.SGD as Python runs it on the CPU: one
/// in-place operation after the other, each of which rounds.
///
/// LibTorch's fused kernel does the same in one pass and a fifth of the time, but rounds the
/// elements after the last full vector otherwise. So tensors go through the fused kernel up to the
/// last multiple of 16 elements (a multiple of every vector that LibTorch uses). The rest, and
/// tensors that are small, go through a loop of our own that rounds as the plain operations do.
/// These round with a fused multiply-add or without. Which one depends on LibTorch's kernels for
/// this processor and is found out by trying.
///
/// These take the plain operations:
/// - tensors that are not dense float32 on the CPU,
/// - gradients that are sparse or in another order than their parameter,
/// - all tensors, when LibTorch's fused kernel turns out to have other bits.
class Sgd : public Optimizer {
 public:
  Sgd(std::vector<at::Tensor> parameters, const OptimizerOptions& options);

  void step() override;
  void set_lr(double lr) override { lr_ = lr; }
  double lr() const override { return lr_; }
  const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  StateDict state() const override;
  void load_state(const StateDict& state) override;
  const std::string& name() const override { return name_; }
  bool is_elementwise() const override { return true; }

  /// How the plain operations round a + b * c: in one rounding, in two, or not in one way.
  enum class Rounding { once, twice, unknown };
  /// `unknown` also stands for a fused kernel that does not follow.
  Rounding rounding() const { return rounding_; }

 private:
  void step_plain(size_t index, const at::Tensor& gradient);
  void step_elements(size_t index, const at::Tensor& gradient, int64_t begin);
  bool can_fuse(size_t index, const at::Tensor& gradient) const;
  void add_to_fused(size_t index, const at::Tensor& gradient);
  void run_fused();
  Rounding find_rounding() const;

  std::string name_ = "sgd";
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> buffers_;  ///< Momentum; undefined until a parameter's first gradient.
  double lr_;
  double momentum_;
  double dampening_;
  double weight_decay_;
  bool nesterov_;
  Rounding rounding_;
  /// Of one step; members so that a step allocates nothing.
  std::vector<at::Tensor> fused_parameters_;
  std::vector<at::Tensor> fused_gradients_;
  std::vector<at::Tensor> fused_buffers_;
};

}  // namespace lockstep
