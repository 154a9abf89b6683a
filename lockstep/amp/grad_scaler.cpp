#include "lockstep/amp/grad_scaler.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "lockstep/amp/loss_scale.h"
#include "lockstep/base/error.h"
#include "lockstep/optim/clip.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse(const std::string& message, const std::string& hint) {
  throw UsageError("GradScaler: " + message, hint);
}

constexpr const char* kOnce = "call it once per optimizer, then update() at the iteration's end";

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options, ProcessGroup group)
    : options_(options), group_(std::move(group)) {
  if (!options.enabled) return;
  if (!(options.init_scale > 0) || !std::isfinite(options.init_scale)) {
    refuse("init_scale must be above 0, got " + std::to_string(options.init_scale), {});
  }
  if (!(options.growth_factor > 1)) refuse("the growth factor must be above 1", {});
  if (!(options.backoff_factor < 1)) refuse("the backoff factor must be below 1", {});
  if (options.growth_interval < 1) refuse("the growth interval must be 1 or more", {});
}

GradScaler::~GradScaler() = default;

at::Tensor GradScaler::scale(const at::Tensor& outputs) {
  if (!options_.enabled) return outputs;
  if (!scale_) {
    scale_ =
        std::make_unique<detail::LossScale>(options_.init_scale, growth_tracker_, outputs.device());
  }
  return scale_->scaled(outputs);
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> scaled;
  for (const at::Tensor& output : outputs) scaled.push_back(scale(output));
  return scaled;
}

void GradScaler::require_scale(const char* call) const {
  if (scale_) return;
  refuse(std::string(call) + "() before any scale(): there is no scale yet",
         "run backward from scaler.scale(loss)");
}

/// Unscales, or, with an optimizer that divides by itself, only looks.
void GradScaler::look(Optimizer& optimizer, bool may_wait, Progress& now) const {
  const auto gradients = detail::gradients_of(optimizer.parameters());
  const bool half = std::any_of(gradients.begin(), gradients.end(), [](const at::Tensor& gradient) {
    return gradient.scalar_type() == at::kHalf;
  });
  now.still_scaled = optimizer.takes_grad_scale() && (half || may_wait);
  if (half && !now.still_scaled) {
    refuse(
        "float16 gradients would underflow without their scale",
        "keep the parameters in float32 and compute under Autocast, or give the optimizer master "
        "weights (MasterWeights)");
  }
  now.found_inf = scale_->unscale(gradients, /*check_only=*/now.still_scaled, group_);
}

void GradScaler::unscale_(Optimizer& optimizer) {
  if (!options_.enabled) return;
  require_scale("unscale_");
  Progress& now = progress(optimizer);
  if (now.stage == Stage::unscaled) {
    refuse("unscale_() has already been called on this optimizer since the last update()", kOnce);
  }
  if (now.stage == Stage::stepped) refuse("unscale_() is being called after step()", kOnce);
  look(optimizer, /*may_wait=*/false, now);
  now.stage = Stage::unscaled;
}

double GradScaler::clip_grad_norm_(Optimizer& optimizer, double max_norm) {
  if (!options_.enabled) return clip_grad_norm(optimizer.parameters(), max_norm);
  const Progress& now = progress(optimizer);
  if (now.stage != Stage::unscaled) {
    refuse(now.stage == Stage::ready
               ? "clip_grad_norm_() before unscale_(): the gradients still have the loss's scale"
               : "clip_grad_norm_() after step()",
           "call scaler.unscale_(optimizer), then clip, then scaler.step(optimizer)");
  }
  if (!now.still_scaled) return clip_grad_norm(optimizer.parameters(), max_norm);
  const double scale = scale_->value();
  return clip_grad_norm(optimizer.parameters(), max_norm * scale) / scale;
}

bool GradScaler::step(Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return true;
  }
  require_scale("step");
  Progress& now = progress(optimizer);
  if (now.stage == Stage::stepped) {
    refuse("step() has already been called on this optimizer since the last update()", kOnce);
  }
  if (now.stage == Stage::ready) look(optimizer, /*may_wait=*/true, now);
  optimizer.step_scaled({now.still_scaled ? scale_->tensor() : at::Tensor(), now.found_inf});
  now.stage = Stage::stepped;
  return now.found_inf.item<double>() == 0;
}

void GradScaler::update() {
  if (!options_.enabled) return;
  require_scale("update");
  at::Tensor found;
  for (const auto& [optimizer, progress] : progress_) {
    if (!progress.found_inf.defined()) continue;
    found = found.defined() ? at::maximum(found, progress.found_inf) : progress.found_inf;
  }
  if (!found.defined()) {
    refuse("update() without a step() or unscale_() since the last one",
           "call scaler.step(optimizer) first");
  }
  scale_->update(found,
                 {options_.growth_factor, options_.backoff_factor, options_.growth_interval});
  progress_.clear();
}

void GradScaler::update(double new_scale) {
  if (!options_.enabled) return;
  require_scale("update");
  scale_->set(new_scale);
  progress_.clear();
}

double GradScaler::get_scale() const {
  if (!options_.enabled) return 1;
  return scale_ ? scale_->value() : options_.init_scale;
}

StateDict GradScaler::state_dict() const {
  if (!options_.enabled) return {};
  return detail::scaler_state({get_scale(), options_.growth_factor, options_.backoff_factor,
                               options_.growth_interval,
                               scale_ ? scale_->growth_tracker() : growth_tracker_});
}

void GradScaler::load_state_dict(const StateDict& state) {
  if (!options_.enabled) return;
  const detail::ScalerState loaded = detail::read_scaler_state(state);
  options_.init_scale = loaded.scale;
  options_.growth_factor = loaded.growth_factor;
  options_.backoff_factor = loaded.backoff_factor;
  options_.growth_interval = loaded.growth_interval;
  growth_tracker_ = loaded.growth_tracker;
  if (scale_) scale_->set(loaded.scale, loaded.growth_tracker);
}

}  // namespace lockstep
