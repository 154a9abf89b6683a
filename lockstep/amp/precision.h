#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

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

namespace detail {
class LossScale;
}

struct PrecisionOptions {
  /// One of precision_names(). Twice the memory of 16 bits, and the only one that never needs care.
  std::string precision = "32-true";
  /// Apex's level, O0 to O3; empty: as `precision` says. With a level, `precision` says which 16
  /// bits are meant: bf16-mixed or bf16-true for bfloat16, anything else for Apex's own, float16.
  std::string amp_level = {};
  /// "dynamic", or a number by which the loss is multiplied in every step. Empty: dynamic where
  /// gradients are made in float16 and kept in float32, else none, as in Apex.
  std::string loss_scale = {};
  c10::Device device = c10::kCPU;
};

/// In which numbers a model computes. It knows no strategy and no trainer; a step loop asks it at
/// each of its joints. In 32-true every one of them does nothing.
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
/// In a step loop:
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
///       strategy->step(scale);                                 // changes nothing after an
///       overflow strategy->zero_grad(); precision.update();
///     }
///
/// An evaluation runs `convert_output(forward(convert_input(x)))` as the strategy's predict does
/// it, in the forward context, and needs nothing else.
///
/// One thread at a time, but for `scale` and the conversions: several threads may call these. Every
/// rank makes the same calls.
class Precision {
 public:
  /// Throws UsageError for an unknown name (with the nearest), for a level that contradicts the
  /// precision, for a loss scale that is no number above 0, and for a precision that the device
  /// lacks. That last is tried out, in a few milliseconds.
  explicit Precision(const PrecisionOptions& options = {});
  ~Precision();
  Precision(Precision&&) noexcept;
  Precision& operator=(Precision&&) noexcept;

  /// "32-true", "O2 in float16", ...: for messages and for what a checkpoint belongs to.
  const std::string& name() const { return name_; }
  /// float32, or the 16-bit dtype.
  at::ScalarType dtype() const { return dtype_; }
  /// Empty, or why this precision will not be faster than float32 here, for a warning.
  std::string slow_because() const;

  /// For StrategyOptions::forward_context: enters Autocast. Empty where forward needs none.
  std::function<std::shared_ptr<void>()> forward_context() const;
  /// The same for a loop of one's own: autocast until the result is let go. Null where there is
  /// none.
  [[nodiscard]] std::shared_ptr<void> autocast() const;
  /// Gives parameters and buffers their dtypes, in place. Whatever holds the module's tensors must
  /// be made after it. Batch norm is every module with running statistics.
  void convert(torch::nn::Module& module) const;
  /// A floating-point tensor in the dtype of the model's inputs; every other tensor as it is.
  at::Tensor convert_input(const at::Tensor& input) const;
  /// A 16-bit output in float32, so that a loss is computed there. Under autocast too.
  at::Tensor convert_output(const at::Tensor& output) const;
  /// The same optimizer, over float32 copies of the parameters where the level has them. The type
  /// is a strategy's OptimizerFactory.
  using OptimizerFactory =
      std::function<std::unique_ptr<Optimizer>(std::vector<at::Tensor> parameters)>;
  OptimizerFactory optimizer_factory(OptimizerFactory make) const;

  /// The loss from which backward runs.
  at::Tensor scale(const at::Tensor& loss) const;
  /// After a step's last batch: divides the gradients by the scale, and looks for an infinity or
  /// NaN where the scale is dynamic. With a group, where ranks have different gradients, it tells
  /// all ranks: a collective. What it gives goes to the optimizer's step. Where there are float32
  /// copies the gradients keep their scale until then. Throws UsageError when called twice.
  StepScale unscale(const std::vector<at::Tensor>& gradients,
                    const ProcessGroup& sharded_over = {});
  /// For a loop of one's own with one optimizer whose gradients are the same on all ranks:
  /// `unscale` (unless that has been called, to clip), the optimizer's step, and `update`. Whether
  /// it stepped.
  bool step(Optimizer& optimizer);
  /// Clips through `clip`, which gets the norm that scaled gradients may have. Returns what it
  /// returns, without the scale. Throws UsageError before `unscale`.
  double clip_grad_norm(double max_norm, const std::function<double(double max_norm)>& clip) const;
  /// Whether gradients overflowed, so that this step changes nothing: from `unscale` to the next
  /// one. Only ever with a dynamic scale. Waits for a CUDA device.
  bool skipped() const;
  /// At the step's end. A dynamic scale shrinks after an overflow and grows after 2,000 steps
  /// without. Throws NumericError, on all ranks, when it has shrunk to nothing: then the gradients
  /// are not finite at any scale. Throws UsageError without `unscale`.
  void update();

  /// Whether the loss is scaled.
  bool scales() const { return loss_scale_ != nullptr; }
  /// Whether infinite gradients are routine: they end in a skipped step and a smaller scale. A loop
  /// that stops at one must not then.
  bool expects_overflow() const { return dynamic_; }
  double loss_scale() const;

  /// The scaler's state; empty without a dynamic scale. See GradScaler::state_dict.
  OptimizerState state() const;
  /// Takes an empty state too, of a run in another precision: the scale starts anew. Throws
  /// CheckpointError where an entry is missing.
  void load_state(const OptimizerState& state);

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

}  // namespace lockstep
