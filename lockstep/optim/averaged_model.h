#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/optim/optim.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

struct AveragedModelOptions {
  /// Of the exponential moving average, 0 to 1: average = decay * average + (1 - decay) * model.
  /// 0.999 is PyTorch's. None: the plain mean of all updates (Izmailov et al. 2018).
  std::optional<double> decay = 0.999;
  /// Whether buffers (batch norm's statistics) are averaged too. False: the newest are copied, and
  /// statistics for averaged weights have to be made anew.
  bool use_buffers = false;
};

/// Averages of a module's weights over the steps of a training, which often predict better than the
/// last ones: torch.optim.swa_utils.AveragedModel, to its bits (with get_ema_multi_avg_fn where
/// there is a decay).
///
///     AveragedModel average(*model, {.decay = 0.999});
///     for (...) { ...; optimizer->step(); average.update_parameters(); }
///     {
///       const auto swapped = average.swapped_in();   // evaluate with the average
///     }
///
/// It keeps a copy of each tensor. Ranks with equal weights have equal averages, without
/// communication. One thread at a time.
class AveragedModel {
 public:
  /// Throws UsageError for a decay outside of 0 to 1. `module` must outlive it and keep its
  /// tensors.
  explicit AveragedModel(torch::nn::Module& module, const AveragedModelOptions& options = {});

  /// Takes the module's present weights into the average: the first time it copies them.
  void update_parameters();
  int64_t n_averaged() const { return n_averaged_; }

  /// The averages, in the order of the module's parameters and then of its buffers. A tensor that
  /// the module has under two names is there twice.
  const std::vector<at::Tensor>& averages() const { return averages_; }
  /// Until the result is let go, the module has the averages, and these have its weights. Do not
  /// step meanwhile; this object's other calls throw UsageError, but for averages(). Throws
  /// UsageError before the first update, and while it is swapped in.
  [[nodiscard]] std::shared_ptr<void> swapped_in();
  /// Gives the averages to the module for good.
  void copy_to_module() const;

  /// "n_averaged" (int64, one number), and the averages by the module's names as "module.NAME".
  OptimizerState state_dict() const;
  /// Throws CheckpointError where an entry is missing or of another shape, and then changes
  /// nothing.
  void load_state_dict(const OptimizerState& state);

 private:
  void require_update(const char* call) const;
  void require_own_weights(const char* call) const;
  void swap();

  std::vector<at::Tensor> tensors_;  ///< The module's.
  std::vector<std::string> names_;
  std::vector<size_t> own_;  ///< The first place of each tensor.
  size_t parameters_ = 0;    ///< How many places are those of parameters.
  bool swapped_ = false;     ///< The module has the averages.
  std::vector<at::Tensor> averages_;
  AveragedModelOptions options_;
  int64_t n_averaged_ = 0;
};

}  // namespace lockstep
