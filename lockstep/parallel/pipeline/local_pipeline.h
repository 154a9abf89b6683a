#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/strategy.h"

namespace lockstep {

struct LocalPipelineOptions {
  /// See make_pipeline_schedule. 1f1b needs the least memory.
  std::string schedule = "1f1b";
  /// Parts of a batch. 4 keep two stages busy for 4/5 of the time.
  int64_t num_micro_batches = 4;
  /// Stages per device. 0: the schedule's default, 2 for interleaved-1f1b, else 1.
  int64_t stages_per_device = 0;
  /// The layers at which the second and all further stages begin. Empty: stages of equal cost,
  /// guessed from the layers' parameters (see measure_layer_costs for a better guess).
  std::vector<std::string> plan = {};
  /// Keep only the inputs of stages, and run forward again in backward, with the random numbers
  /// that it had. All stages draw from one generator of the process. So forwards of stages, first
  /// or second, run one at a time; backwards still run beside them. Then no forward or loss may
  /// call collectives, and no layer may draw in backward, as one with `checkpoint` does.
  bool recompute_activations = false;
  /// Empty: nothing is entered.
  ForwardContext forward_context = {};
};

/// The stages of a model in one process, a thread for each device. For a model that fills one
/// device, and on a CPU to use several cores. The same device may be named several times.
/// Schedules, micro-batches and bits are those of the "pipeline" strategy, which has a process for
/// each rank.
///
/// Gradients add up in the parameters, so any optimizer of `parameters()` can follow. Layers are
/// run in other threads than the caller's, each stage always in the same one, with the caller's
/// number of LibTorch threads. Layers of two stages must not change what they share. With random
/// numbers (dropout), or one tensor in layers of several stages, the stages' order in time decides
/// last bits.
///
/// One thread at a time. The destructor waits for the threads.
class LocalPipeline {
 public:
  /// Moves each layer's module to its stage's device. Throws UsageError for more stages than
  /// layers, a plan that names no layer, no device, and what make_pipeline_schedule throws.
  LocalPipeline(std::vector<Layer> layers, std::vector<c10::Device> devices,
                LocalPipelineOptions options = {});
  ~LocalPipeline();

  /// Forward and backward of one batch: `work.input` and `work.target` are cut into micro-batches,
  /// `work.criterion` runs on the last stage's thread, with targets on its device. Blocks until all
  /// gradients are there. Rethrows the first exception of a stage; gradients are then undefined,
  /// and the pipeline can be used again.
  void run_batch(const BatchWork& work);
  /// The output of a batch, without a graph, on the last stage's device.
  at::Tensor predict(const at::Tensor& input);

  /// The parameters of all layers, each once, in order.
  const std::vector<at::Tensor>& parameters() const;
  /// The first layer of each stage.
  const std::vector<size_t>& stage_starts() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
