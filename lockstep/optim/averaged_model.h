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
  /// Decay of the exponential moving average, 0 to 1: average = decay * average + (1 - decay) *
  /// model. 0.999 is PyTorch's default. None: the plain mean of all updates (Izmailov et al. 2018).
  std::optional<double> decay = 0.999;
  /// Whether buffers (batch norm's statistics) are averaged too. False: the latest are copied, and
  /// batch norm's statistics must be recomputed for the averaged weights.
  bool use_buffers = false;
};

/// Averages of a module's weights over the training steps, which often predict better than the last
/// weights. It is torch.optim.swa_utils.AveragedModel with the same bits (with get_ema_multi_avg_fn
/// if there is a decay).
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

  /// Adds the module's current weights to the average. The first call copies them.
  void update_parameters();
  int64_t n_averaged() const { return n_averaged_; }

  /// The averages: first of the module's parameters, then of its buffers, in their order. A tensor
  /// with two names in the module is listed twice.
  const std::vector<at::Tensor>& averages() const { return averages_; }
  /// Swaps the averages with the module's weights until the result is destroyed. Do not step the
  /// optimizer meanwhile. Until then all other functions of this object except averages() throw
  /// UsageError. Throws UsageError before the first update, and while already swapped in.
  [[nodiscard]] std::shared_ptr<void> swapped_in();
  /// Copies the averages into the module, permanently.
  void copy_to_module() const;

  /// "n_averaged" (int64, one number), and the averages by the module's names as "module.NAME".
  StateDict state_dict() const;
  /// Takes Python's as well. Throws CheckpointError where an entry is missing or of another shape,
  /// and then changes nothing.
  void load_state_dict(const StateDict& state);

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
