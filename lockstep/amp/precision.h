#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/optim/optim.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

/// PyTorch's torch.autocast as a guard. While it lives, each operation on this thread runs in the
/// dtype that suits it: matrix products and convolutions in `dtype`, sums and losses in float32.
/// Parameters keep their dtype. Run forward and the loss in it, and backward outside:
///
///     at::Tensor loss;
///     {
///       const lockstep::Autocast autocast(c10::kCPU, at::kBFloat16);
///       loss = cross_entropy(model->forward(x), y);
///     }
///     lockstep::backward(loss);
///
/// Guards nest. An inner one with `enabled` false computes in the tensors' own dtypes. Each guard
/// restores the previous state. Within the outermost guard the cast of a parameter is cached. The
/// outermost guard clears this cache at its end, so parameters must not change within it. Destroy
/// guards in reverse order, on the thread that made them. A guard does not apply to threads that
/// are started within it.
class Autocast {
 public:
  /// `enabled` false turns autocast off, for example around an operation that needs float32. Throws
  /// UsageError for a dtype other than bfloat16 and float16, and for a device without autocast.
  /// With `enabled` false any dtype is accepted.
  Autocast(c10::DeviceType device, at::ScalarType dtype, bool enabled = true);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  c10::DeviceType device_;
  bool outer_enabled_;
  at::ScalarType outer_dtype_;
};

namespace detail {
class LossScale;
}

struct PrecisionOptions {
  /// One of precision_names(). The default takes twice the memory of 16-bit numbers, and is always
  /// safe.
  std::string precision = "32-true";
  /// Apex's opt_level, O0 to O3. Empty: `precision` decides. With a level, `precision` selects the
  /// 16-bit dtype: bf16-mixed or bf16-true for bfloat16, anything else for float16, as in Apex.
  std::string amp_level = {};
  /// "dynamic", or a fixed number by which the loss is multiplied in every step. Empty: dynamic if
  /// gradients are computed in float16 and kept in float32, else none, as in Apex.
  std::string loss_scale = {};
  c10::Device device = c10::kCPU;
};

/// The numeric precision in which a model computes. It knows no strategy and no trainer: a training
/// loop calls it at the points shown below. With 32-true these calls do nothing.
///
/// | precision  | level | parameters                         | computes in  | loss scale |
/// |------------|-------|------------------------------------|--------------|------------|
/// | 32-true    | O0    | float32                            | float32      | none       |
/// | bf16-mixed |       | float32                            | autocast     | none       |
/// | 16-mixed   | O1    | float32                            | autocast     | dynamic    |
/// |            | O2    | 16 bits, batch norm's float32,     | 16 bits      | dynamic    |
/// |            |       | float32 copies in the optimizer    |              |            |
/// | bf16-true  |       | bfloat16                           | bfloat16     | none       |
/// | 16-true    | O3    | float16                            | float16      | none       |
///
/// In a training loop:
///
///     Precision precision({.precision = "16-mixed"});
///     if (rank == 0 && !precision.slow_because().empty()) log_warning(precision.slow_because());
///     precision.convert(*module);                              // before optimizer and strategy
///     setup.make_optimizer = precision.optimizer_factory(make);
///     setup.options.forward_context = precision.forward_context();
///     auto strategy = make_strategy("ddp", setup);
///     for (...) {
///       for (every batch of the step) {
///         strategy->run_batch({.loss = [&] {
///           auto output = precision.convert_output(module->forward(precision.convert_input(x)));
///           return precision.scale(loss_of(output, y) / batches);
///         }, .last_of_step = last});
///       }
///       const auto scale = precision.unscale(
///           strategy->gradients(),
///           strategy->has_sharded_gradients() ? strategy->group() : ProcessGroup());
///       precision.clip_grad_norm(1.0, [&](double max) { return strategy->clip_grad_norm(max); });
///       strategy->step(scale);  // changes nothing after an overflow
///       strategy->zero_grad();
///       precision.update();
///     }
///
/// Evaluation needs only `convert_output(forward(convert_input(x)))` in the forward context, as the
/// strategy's predict does.
///
/// Only one thread at a time may use it, except `scale` and the conversions, which several threads
/// may call. Every rank makes the same calls.
class Precision {
 public:
  /// Throws UsageError for an unknown name (with the nearest one), for a level that contradicts the
  /// precision, and for a loss scale that is not a number above 0. What the device does not support
  /// is LibTorch's error, in the first forward.
  explicit Precision(const PrecisionOptions& options = {});
  ~Precision();
  Precision(Precision&&) noexcept;
  Precision& operator=(Precision&&) noexcept;

  /// "32-true", "O2 in float16", ...: for messages and for the identity of a checkpoint.
  const std::string& name() const { return name_; }
  /// float32, or the 16-bit dtype.
  at::ScalarType dtype() const { return dtype_; }
  /// Why this precision will not be faster than float32 on this machine, for a warning. Empty if
  /// there is no such reason.
  std::string slow_because() const;

  /// For StrategyOptions::forward_context: enters Autocast. Empty if forward needs no autocast.
  std::function<std::shared_ptr<void>()> forward_context() const;
  /// The same for your own loop: autocast until the result is destroyed. Null if forward needs no
  /// autocast.
  [[nodiscard]] std::shared_ptr<void> autocast() const;
  /// Converts parameters and buffers to their dtypes, in place. Objects that hold the module's
  /// tensors must be made after it. Every module with running statistics counts as batch norm.
  void convert(torch::nn::Module& module) const;
  /// Converts a floating-point tensor to the dtype of the model's inputs. Any other tensor is
  /// returned unchanged.
  at::Tensor convert_input(const at::Tensor& input) const;
  /// Converts a 16-bit output to float32, so that the loss is computed in float32, under autocast
  /// too.
  at::Tensor convert_output(const at::Tensor& output) const;
  /// A factory of the same optimizer, over float32 copies of the parameters if the level has them.
  OptimizerFactory optimizer_factory(OptimizerFactory make) const;

  /// The scaled loss, on which to call backward.
  at::Tensor scale(const at::Tensor& loss) const;
  /// Call it after the last batch of a step. Divides the gradients by the scale. If the scale is
  /// dynamic, also checks them for infinity and NaN. Give a group if ranks have different
  /// gradients: then it is a collective, and all ranks learn of an overflow. Pass the result to the
  /// optimizer's step. With float32 copies the gradients stay scaled until that step. Throws
  /// UsageError when called twice.
  StepScale unscale(const std::vector<at::Tensor>& gradients,
                    const ProcessGroup& sharded_over = {});
  /// For your own loop with one optimizer whose gradients are the same on all ranks: calls
  /// `unscale` (unless it was called before, to clip), the optimizer's step, and `update`. Returns
  /// whether the optimizer stepped.
  bool step(Optimizer& optimizer);
  /// Clips by calling `clip` with the maximum norm, multiplied by the scale if the gradients are
  /// still scaled. Returns the norm without the scale. Throws UsageError before `unscale`.
  double clip_grad_norm(double max_norm, const std::function<double(double max_norm)>& clip) const;
  /// Whether gradients overflowed, so that this step changes nothing. Valid from one `unscale` to
  /// the next. Always false without a dynamic scale. Waits for a CUDA device.
  bool skipped() const;
  /// Call it at the end of a step. A dynamic scale shrinks after an overflow and grows after 2,000
  /// steps without one. Throws NumericError on all ranks when the scale has become too small: then
  /// the gradients are not finite at any scale. Throws UsageError without `unscale`.
  void update();

  /// Whether the loss is scaled.
  bool scales() const { return loss_scale_ != nullptr; }
  /// Whether infinite gradients are expected: they cause a skipped step and a smaller scale. Then a
  /// loop must not stop because of one.
  bool expects_overflow() const { return dynamic_; }
  double loss_scale() const;

  /// The scaler's state; empty without a dynamic scale. See GradScaler::state_dict.
  StateDict state() const;
  /// Accepts an empty state too, from a run in another precision: then the scale starts from its
  /// initial value. Throws CheckpointError if an entry is missing.
  void load_state(const StateDict& state);

 private:
  StepScale scale_of_step() const;

  std::string name_;
  c10::Device device_;
  at::ScalarType dtype_ = at::kFloat;
  bool autocast_ = false;        ///< Else the parameters have dtype_.
  bool master_weights_ = false;  ///< With batch norm in float32.
  bool dynamic_ = false;
  std::unique_ptr<detail::LossScale> loss_scale_;
  bool unscaled_ = false;
  at::Tensor found_inf_;  ///< Of the last unscale.
};

/// 32-true, bf16-mixed, 16-mixed, bf16-true, 16-true.
std::vector<std::string> precision_names();
/// O0, O1, O2, O3.
std::vector<std::string> amp_level_names();

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
  /// `make` gets the copies, and the parameters that have no copy, in the order of `parameters`.
  MasterWeights(std::vector<at::Tensor> parameters, const OptimizerFactory& make);

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
