#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>

#include "lockstep/train/metric_sums.h"

namespace lockstep {
class TrainingModuleBase;
}

namespace lockstep::detail {

/// What a module's protected functions reach while the Trainer calls it.
struct TrainingContext {
  c10::Device device = c10::kCPU;
  int64_t step = 0;
  int64_t epoch = 0;
  MetricSums sums = {};  ///< What the batch in progress has noted.
  /// Behind TrainingModuleBase::update and accumulate, which is not the last of a step. Empty
  /// outside of training.
  std::function<double(const std::string& name, const std::function<at::Tensor()>& loss,
                       bool last_of_step)>
      update = {};

  /// The context that `module` has while this lives; then again the one before.
  class Scope {
   public:
    Scope(TrainingModuleBase& module, TrainingContext& context);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    TrainingModuleBase& module_;
    TrainingContext* before_;
  };
};

}  // namespace lockstep::detail
