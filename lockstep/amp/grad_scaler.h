#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/optim/optim.h"

namespace lockstep {

namespace detail {
class LossScale;
}

/// PyTorch's defaults.
struct GradScalerOptions {
  /// 2^16 is too large for most models at first. This costs a few skipped steps.
  double init_scale = 65536;
  double growth_factor = 2;        ///< More than 1.
  double backoff_factor = 0.5;     ///< Less than 1.
  int64_t growth_interval = 2000;  ///< Steps without an overflow, after which the scale grows.
  /// False: every call does what a program without a scaler would do, so that one loop works for
  /// both.
  bool enabled = true;
};

/// PyTorch's torch.amp.GradScaler, with the same bits. Small gradients underflow in float16. So the
/// loss is multiplied by a large scale, and the gradients are divided by it before the step. If
/// they overflowed, the step is skipped and the scale shrinks:
///
///     lockstep::backward(scaler.scale(loss));
///     scaler.unscale_(*optimizer);                  // only to clip, or to look at gradients
///     scaler.clip_grad_norm_(*optimizer, 1.0);
///     scaler.step(*optimizer);
///     scaler.update();
///
/// With a group it is torch.distributed.fsdp's ShardedGradScaler: either all ranks skip a step, or
/// none. A program whose ranks have different gradients needs the group. With
/// DistributedDataParallel it is not needed: gradients are averaged, so every rank sees an
/// infinity.
///
/// Only one thread at a time may use it. Optimizers must outlive the iteration. Wrong calls throw
/// UsageError.
class GradScaler {
 public:
  /// With a group, unscale_ and step are collectives: every rank of `group` makes the same calls.
  explicit GradScaler(const GradScalerOptions& options = {}, ProcessGroup group = {});
  ~GradScaler();

  /// Multiplies by the scale, recorded by autograd. The first call decides the scale's device.
  at::Tensor scale(const at::Tensor& outputs);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);

  /// Divides the gradients of the optimizer's parameters by the scale, and checks whether one is
  /// infinite or NaN. Call it once per optimizer and iteration, after the last backward. Throws for
  /// float16 gradients, which would underflow. With master weights the gradients stay scaled until
  /// the optimizer's step.
  void unscale_(Optimizer& optimizer);
  /// torch.nn.utils.clip_grad_norm_ over the optimizer's parameters. `max_norm` applies to unscaled
  /// gradients. Throws UsageError before unscale_. Returns the norm before clipping: infinity or
  /// NaN if the step will be skipped.
  double clip_grad_norm_(Optimizer& optimizer, double max_norm);
  /// Unscales, unless unscale_ was called, and steps, unless a gradient is infinite or NaN. Returns
  /// whether it stepped. Call it once per optimizer and iteration.
  bool step(Optimizer& optimizer);
  /// Call it at the end of an iteration, after the steps of all optimizers. Shrinks the scale if a
  /// step was skipped. Grows it after `growth_interval` iterations without a skipped step.
  void update();
  /// The same, but sets this scale.
  void update(double new_scale);

  /// The current scale; 1 if not enabled. Waits for a CUDA device.
  double get_scale() const;
  double get_growth_factor() const { return options_.growth_factor; }
  void set_growth_factor(double factor) { options_.growth_factor = factor; }
  double get_backoff_factor() const { return options_.backoff_factor; }
  void set_backoff_factor(double factor) { options_.backoff_factor = factor; }
  int64_t get_growth_interval() const { return options_.growth_interval; }
  void set_growth_interval(int64_t interval) { options_.growth_interval = interval; }
  bool is_enabled() const { return options_.enabled; }

  /// Python's entries, each a tensor of one element: scale, growth_factor and backoff_factor
  /// (float64), growth_interval and _growth_tracker (int64). Empty if not enabled. Call it after
  /// `update`.
  StateDict state_dict() const;
  /// Throws CheckpointError if an entry is missing. Does nothing if not enabled.
  void load_state_dict(const StateDict& state);

 private:
  enum class Stage { ready, unscaled, stepped };
  /// Of an optimizer in this iteration.
  struct Progress {
    Stage stage = Stage::ready;
    at::Tensor found_inf;  ///< Undefined: not looked yet.
    bool still_scaled = false;
  };

  void require_scale(const char* call) const;
  Progress& progress(const Optimizer& optimizer) { return progress_[&optimizer]; }
  void look(Optimizer& optimizer, bool may_wait, Progress& now) const;

  GradScalerOptions options_;
  ProcessGroup group_;
  int64_t growth_tracker_ = 0;                ///< Until there is a scale.
  std::unique_ptr<detail::LossScale> scale_;  ///< From the first `scale` on.
  std::map<const Optimizer*, Progress> progress_;
};

}  // namespace lockstep
