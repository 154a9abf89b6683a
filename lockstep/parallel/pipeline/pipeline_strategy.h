#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/device_mesh.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep {

namespace detail {
class RowStrategy;
}

/// Each rank has some consecutive layers of the model, a stage, and only their parameters,
/// gradients and optimizer state. A batch goes through the stages in micro-batches, by the schedule
/// of PipelineOptions::schedule. With a mesh "dp=N,pp=M" there are N such pipelines, whose
/// gradients are averaged as by ddp. make_strategy makes pipelines of the other strategies.
///
/// - Needs `setup.layers`, and of each BatchWork `input`, `target` and `criterion`. `criterion` is
///   called on the rank of the last stage only, once for each micro-batch, in their order.
/// - Losses and gradients are those of one process that accumulates the same micro-batches, to the
///   last bit. Only tied parameters (one tensor in layers of several stages) are summed in another
///   order: over each stage first, then over the stages.
/// - Each batch is cut into PipelineOptions::num_micro_batches parts, as equal as can be, or fewer
///   where it has fewer samples. Parts that are not equal weigh as many samples as they have.
/// - The memory of parameters of other ranks' stages is freed, and their values are NaN from then
///   on. Save the model with `model_state`.
/// - Layers must give one tensor whose shape depends on the input's shape alone.
///
/// A collective of `setup.group`. Throws UsageError for an impossible setup: no layers, more stages
/// than layers, a mesh without pp or with unknown dimensions, a plan with an unknown layer name, or
/// a parameter in no layer. Throws MismatchError where the ranks' modules differ.
std::unique_ptr<Strategy> make_pipeline_strategy(const StrategySetup& setup);

namespace detail {
/// A pipeline over the mesh's dimension pp. `make_row` says what ranks with the same stages do.
std::unique_ptr<Strategy> make_pipeline(
    const std::string& name, const StrategySetup& setup, const DeviceMesh& mesh,
    std::unique_ptr<RowStrategy> (*make_row)(const StrategySetup& setup, bool micro_batches));
}  // namespace detail

/// Cuts a chain of layers into stages: the first layer of each stage, beginning with 0. Every stage
/// gets at least one layer, and the cost of the costliest stage is minimal. Among equal solutions
/// the one with the latest boundaries is taken. Throws UsageError for more stages than layers.
std::vector<size_t> balance_stages(const std::vector<double>& costs, int num_stages);

/// The stages of a plan that names the layers at which the second and all further stages begin, as
/// PyTorch's split_spec does. Throws UsageError for a name that no layer has (with the nearest),
/// for names out of order and for another number of stages.
std::vector<size_t> planned_stages(const std::vector<Layer>& layers,
                                   const std::vector<std::string>& plan, int num_stages);

/// Estimates the costs of layers without running them: their numbers of parameter elements.
std::vector<double> estimate_layer_costs(const std::vector<Layer>& layers);

/// Seconds of each layer's forward and backward for an input, the least of some runs on this
/// thread. Layers are run in training mode. Their buffers, gradients and random numbers are
/// afterwards as before. `now` gives the time in seconds; empty: a steady clock.
std::vector<double> measure_layer_costs(const std::vector<Layer>& layers, const at::Tensor& input,
                                        const ForwardContext& context = {},
                                        const std::function<double()>& now = {});

/// What PipelineOptions::balance can be.
std::vector<std::string> pipeline_balance_names();

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

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
