#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/pipeline/stage_state.h"

namespace lockstep::detail {

/// What becomes of a stage's gradients after its last micro-batch: those of tied parameters are
/// summed over the stages that use them, and all are averaged over the ranks with the same stage.
class GradientExchange {
 public:
  /// `data_parallel`: the ranks with the same stages; null or of one rank: nothing is averaged.
  GradientExchange(const StageTensors& tensors, ProcessGroup pipeline, ProcessGroup data_parallel);

  /// Before a batch whose gradients add to those that are there.
  void begin();
  /// Collectives of both groups.
  void run();
  /// lockstep::clip_grad_norm over the parameters of all stages, each counted once, with the bits
  /// that one process gets. A collective of the pipeline.
  double clip_grad_norm(c10::Device device, double max_norm) const;
  /// The gradients were dropped.
  void forget() { summed_ = false; }

 private:
  void sum_tied();
  void average();
  void lay_out(const std::vector<at::Tensor>& parameters);

  const StageTensors& tensors_;
  ProcessGroup pipeline_;
  ProcessGroup data_parallel_;
  bool summed_ = false;  ///< Tied parameters' gradients are the sums of all their stages.
  /// One flat tensor a dtype, where the group sums without copies, and the parameters' parts of it.
  std::vector<at::Tensor> flat_;
  std::vector<at::Tensor> laid_out_;
  std::vector<at::Tensor> places_;
};

}  // namespace lockstep::detail
