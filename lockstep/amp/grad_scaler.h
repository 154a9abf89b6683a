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
  /// 2^16: too large at first for most models, which costs a few skipped steps.
  double init_scale = 65536;
  double growth_factor = 2;        ///< More than 1.
  double backoff_factor = 0.5;     ///< Less than 1.
  int64_t growth_interval = 2000;  ///< Steps without an overflow, after which the scale grows.
  /// False: every call does what a program without a scaler would do, so that one loop serves both.
  bool enabled = true;
};

/// PyTorch's torch.amp.GradScaler, to its bits. Gradients in float16 underflow where they are
/// small. So the loss is multiplied by a large scale, and the gradients are divided by it before
/// the step. Where they overflowed, the step is skipped and the scale shrinks:
///
///     lockstep::backward(scaler.scale(loss));
///     scaler.unscale_(*optimizer);                  // only to clip, or to look at gradients
///     scaler.clip_grad_norm_(*optimizer, 1.0);
///     scaler.step(*optimizer);
///     scaler.update();
///
/// With a group it is torch.distributed.fsdp's ShardedGradScaler: all ranks skip a step, or none. A
/// program whose ranks have different gradients needs it. DistributedDataParallel averages
/// gradients, and an infinity with them, so every rank sees it by itself.
///
/// One thread at a time, and optimizers outlive the iteration. Errors are UsageErrors.
class GradScaler {
 public:
  /// Every rank of `group` then makes the same calls of unscale_ and step, which are collectives.
  explicit GradScaler(const GradScalerOptions& options = {}, ProcessGroup group = {});
  ~GradScaler();

  /// The product, with a graph. The first call decides on which device the scale lies.
  at::Tensor scale(const at::Tensor& outputs);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);

  /// Divides the gradients of the optimizer's parameters, and notes whether one is infinite or NaN.
  /// Once per optimizer and iteration, after the last backward. float16 gradients are refused, as
  /// they would underflow. Those of an optimizer with master weights keep their scale until its
  /// step.
  void unscale_(Optimizer& optimizer);
  /// torch.nn.utils.clip_grad_norm_ over the optimizer's parameters, in terms of gradients without
  /// the scale. Throws UsageError before unscale_, when the norm would be the scale's. Gives the
  /// norm before; infinity or NaN where the step will be skipped.
  double clip_grad_norm_(Optimizer& optimizer, double max_norm);
  /// Unscales, unless unscale_ has, and steps, unless a gradient is infinite or NaN. Whether it did
  /// step. Once per optimizer and iteration.
  bool step(Optimizer& optimizer);
  /// At the end of an iteration, after the steps of all its optimizers. Shrinks the scale where one
  /// was skipped. Grows it after `growth_interval` iterations without.
  void update();
  /// The same, but takes this scale.
  void update(double new_scale);

  /// 1 if it is not enabled. Waits for a CUDA device.
  double get_scale() const;
  double get_growth_factor() const { return options_.growth_factor; }
  void set_growth_factor(double factor) { options_.growth_factor = factor; }
  double get_backoff_factor() const { return options_.backoff_factor; }
  void set_backoff_factor(double factor) { options_.backoff_factor = factor; }
  int64_t get_growth_interval() const { return options_.growth_interval; }
  void set_growth_interval(int64_t interval) { options_.growth_interval = interval; }
  bool is_enabled() const { return options_.enabled; }

  /// Python's entries, a tensor of one element each: scale, growth_factor and backoff_factor
  /// (float64), growth_interval and _growth_tracker (int64). Empty if it is not enabled. To be
  /// called after `update`.
  OptimizerState state_dict() const;
  /// Throws CheckpointError where an entry is missing. Does nothing if it is not enabled.
  void load_state_dict(const OptimizerState& state);

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
