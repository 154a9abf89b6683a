#include "lockstep/amp/precision.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "lockstep/amp/half_support.h"
#include "lockstep/amp/loss_scale.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/optim/clip.h"

namespace lockstep {
namespace {

/// Apex's and PyTorch's start of a dynamic scale.
constexpr double kFirstScale = 65536;
/// The smallest number above 0 in float16, 2^-24. From the first scale 40 steps in a row lead
/// there.
constexpr double kSmallestScale = 5.9604644775390625e-08;
constexpr detail::LossScaleRule kRule;

/// What a precision and a level come to.
struct Meaning {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  bool autocast = false;
  bool master_weights = false;
};

/// O0 and O3 compute in one dtype, O1 and O2 are mixed.
void check_level_fits(const std::string& level, const std::string& precision) {
  const bool mixed = level == "O1" || level == "O2";
  if (precision == "32-true" && level != "O0") return;  // The default, which says nothing.
  if (precision == "32-true" || (level != "O0" && precision.ends_with("-mixed") == mixed)) return;
  const std::vector<std::string> fitting = level == "O0" ? std::vector<std::string>{"32-true"}
                                           : mixed
                                               ? std::vector<std::string>{"16-mixed", "bf16-mixed"}
                                               : std::vector<std::string>{"16-true", "bf16-true"};
  throw UsageError("amp level " + level + " contradicts precision " + precision,
                   "with " + level + " take precision " + join(fitting, " or ") +
                       ", or leave the precision out");
}

void expect_known(const char* kind, const std::string& word, const std::vector<std::string>& known,
                  const std::string& hint = {}) {
  if (std::find(known.begin(), known.end(), word) == known.end())
    throw UsageError(unknown_word(kind, word, known), hint);
}

Meaning meaning_of(const PrecisionOptions& options) {
  const std::string &precision = options.precision, &level = options.amp_level;
  expect_known("precision", precision, precision_names());
  const at::ScalarType half = precision.starts_with("bf16") ? at::kBFloat16 : at::kHalf;
  if (level.empty()) {
    if (precision == "32-true") return {precision};
    return {precision, half, precision.ends_with("-mixed")};
  }
  expect_known(
      "amp level", level, amp_level_names(),
      level.starts_with("0") ? "the first character is a capital letter O, not a zero" : "");
  check_level_fits(level, precision);
  if (level == "O0") return {level};
  return {level + " in " + detail::dtype_name(half), half, level == "O1", level == "O2"};
}

/// None: the loss is not scaled.
std::optional<double> static_scale(const std::string& text) {
  const auto number = parse_double(text);
  if (!number || !(*number > 0) || !std::isfinite(*number)) {
    throw UsageError("loss scale '" + text + "' is neither 'dynamic' nor a number above 0",
                     "powers of two, such as 128 or 1024, round nothing");
  }
  return *number == 1 ? std::nullopt : number;
}

bool is_floating(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_floating_point();
}

void convert_tensor(at::Tensor& tensor, at::ScalarType dtype) {
  if (is_floating(tensor)) tensor.set_data(tensor.to(dtype));
}

/// Batch norm of any kind, a user's own included.
bool has_running_statistics(const torch::nn::Module& module) {
  const auto buffers = module.named_buffers(/*recurse=*/false);
  return buffers.contains("running_mean") && buffers.contains("running_var");
}

}  // namespace

std::vector<std::string> precision_names() {
  return {"32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"};
}

std::vector<std::string> amp_level_names() {
  return {"O0", "O1", "O2", "O3"};
}

Precision::Precision(const PrecisionOptions& options) : device_(options.device) {
  const Meaning meaning = meaning_of(options);
  name_ = meaning.name;
  dtype_ = meaning.dtype;
  autocast_ = meaning.autocast;
  master_weights_ = meaning.master_weights;
  // Where float32 gradients come out of float16. bfloat16 has the range of float32.
  const bool wants_scale = dtype_ == at::kHalf && (autocast_ || master_weights_);
  dynamic_ = options.loss_scale == "dynamic" || (options.loss_scale.empty() && wants_scale);
  std::optional<double> scale;
  if (dynamic_) scale = kFirstScale;
  if (!dynamic_ && !options.loss_scale.empty()) scale = static_scale(options.loss_scale);
  if (scale) loss_scale_ = std::make_unique<detail::LossScale>(*scale, 0, device_);
}

Precision::~Precision() = default;
Precision::Precision(Precision&&) noexcept = default;
Precision& Precision::operator=(Precision&&) noexcept = default;

std::string Precision::slow_because() const {
  if (dtype_ == at::kFloat) return {};
  const HalfSupport support = half_support(device_, dtype_);
  if (support.fast) return {};
  return "precision " + name_ + ": " + detail::dtype_name(dtype_) +
         " is no faster than float32 on " + device_.str() + ": " + support.reason +
         (dtype_ == at::kHalf && half_support(device_, at::kBFloat16).fast
              ? "; bfloat16 is faster here (bf16-mixed, or bf16-true)"
              : "");
}

std::function<std::shared_ptr<void>()> Precision::forward_context() const {
  if (!autocast_) return {};
  return [device = device_.type(), dtype = dtype_]() -> std::shared_ptr<void> {
    return std::make_shared<Autocast>(device, dtype);
  };
}

std::shared_ptr<void> Precision::autocast() const {
  return autocast_ ? std::make_shared<Autocast>(device_.type(), dtype_) : nullptr;
}

void Precision::convert(torch::nn::Module& module) const {
  if (autocast_ || dtype_ == at::kFloat) return;
  const c10::AutoGradMode no_grad(false);
  const auto convert_own = [&](torch::nn::Module& part) {
    if (master_weights_ && has_running_statistics(part)) return;
    for (auto& item : part.named_parameters(/*recurse=*/false)) {
      convert_tensor(item.value(), dtype_);
      convert_tensor(item.value().mutable_grad(), dtype_);
    }
    for (auto& item : part.named_buffers(/*recurse=*/false)) convert_tensor(item.value(), dtype_);
  };
  convert_own(module);
  for (const auto& part : module.modules(/*include_self=*/false)) convert_own(*part);
}

at::Tensor Precision::convert_input(const at::Tensor& input) const {
  if (autocast_ || dtype_ == at::kFloat || !is_floating(input)) return input;
  return input.to(dtype_);
}

at::Tensor Precision::convert_output(const at::Tensor& output) const {
  if (dtype_ == at::kFloat || !is_floating(output) || output.scalar_type() != dtype_) return output;
  return output.to(at::kFloat);
}

OptimizerFactory Precision::optimizer_factory(OptimizerFactory make) const {
  if (!master_weights_) return make;
  return [make = std::move(make)](std::vector<at::Tensor> parameters) {
    return std::make_unique<MasterWeights>(std::move(parameters), make);
  };
}

at::Tensor Precision::scale(const at::Tensor& loss) const {
  return loss_scale_ ? loss_scale_->scaled(loss) : loss;
}

StepScale Precision::unscale(const std::vector<at::Tensor>& gradients,
                             const ProcessGroup& sharded_over) {
  if (!loss_scale_) return {};
  if (unscaled_) {
    throw UsageError("precision: unscale() has already been called in this step",
                     "call update() at the end of each step");
  }
  unscaled_ = true;
  // Copies in float32 divide by the scale themselves: in float16 gradients would underflow.
  const bool keeps_scale = master_weights_;
  found_inf_ = at::Tensor();
  if (dynamic_ || !keeps_scale) {
    const at::Tensor found =
        loss_scale_->unscale(gradients, keeps_scale, dynamic_ ? sharded_over : ProcessGroup());
    if (dynamic_) found_inf_ = found;
  }
  return scale_of_step();
}

/// For the optimizer, after `unscale`.
StepScale Precision::scale_of_step() const {
  return {master_weights_ ? loss_scale_->tensor() : at::Tensor(), found_inf_};
}

bool Precision::step(Optimizer& optimizer) {
  if (!loss_scale_) {
    optimizer.step();
    return true;
  }
  if (!unscaled_) (void)unscale(detail::gradients_of(optimizer.parameters()));
  optimizer.step_scaled(scale_of_step());
  update();
  return !skipped();
}

double Precision::clip_grad_norm(double max_norm, const std::function<double(double)>& clip) const {
  if (!loss_scale_) return clip(max_norm);
  if (!unscaled_) {
    throw UsageError(
        "precision: clipping before unscale(): the gradients still have the loss's scale",
        "call unscale() after the step's last batch, then clip, then step");
  }
  if (!master_weights_) return clip(max_norm);
  const double scale = loss_scale_->value();
  return clip(max_norm * scale) / scale;
}

bool Precision::skipped() const {
  return found_inf_.defined() && found_inf_.item<double>() != 0;
}

void Precision::update() {
  if (!loss_scale_) return;
  if (!unscaled_) {
    throw UsageError("precision: update() without unscale() in this step",
                     "call unscale() after the step's last batch");
  }
  unscaled_ = false;
  if (!dynamic_) return;
  loss_scale_->update(found_inf_, kRule);
  if (skipped() && loss_scale_->value() < kSmallestScale) {
    throw NumericError("a gradient is NaN or infinite at every loss scale down to 2^-24",
                       "lower --lr, clip with --gradient-clip-val, look at the data, or train with "
                       "--precision bf16-mixed or 32-true");
  }
}

double Precision::loss_scale() const {
  return loss_scale_ ? loss_scale_->value() : 1;
}

StateDict Precision::state() const {
  if (!dynamic_) return {};
  return detail::scaler_state({loss_scale_->value(), kRule.growth_factor, kRule.backoff_factor,
                               kRule.growth_interval, loss_scale_->growth_tracker()});
}

void Precision::load_state(const StateDict& state) {
  if (!dynamic_ || state.empty()) return;
  const detail::ScalerState loaded = detail::read_scaler_state(state);
  loss_scale_->set(loaded.scale, loaded.growth_tracker);
}

}  // namespace lockstep
