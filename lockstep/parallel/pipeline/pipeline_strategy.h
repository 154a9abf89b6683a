#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/strategy.h"

namespace lockstep {

/// Each rank has some consecutive layers of the model, a stage, and only their parameters,
/// gradients and optimizer state. A batch goes through the stages in micro-batches, by the schedule
/// of `options.pipeline_schedule`. With a mesh "dp=N,pp=M" there are N such pipelines, whose
/// gradients are averaged.
///
/// - Needs `setup.layers`, and of each BatchWork `input`, `target` and `criterion`. `criterion` is
///   called on the rank of the last stage only, once for each micro-batch, in their order.
/// - Losses and gradients are those of one process that accumulates the same micro-batches, to the
///   last bit. Only tied parameters (one tensor in layers of several stages) are summed in another
///   order: over each stage first, then over the stages.
/// - Each batch is cut into `options.num_micro_batches` equal parts. A batch smaller than the first
///   one, as at the end of an epoch, may be cut unevenly or into fewer parts. Its parts then weigh
///   as many samples as they have. So may the first batch after load_optimizer_state, which may be
///   the last of an epoch.
/// - The memory of parameters of other ranks' stages is freed, and their values are NaN from then
///   on. Save the model with `model_state`.
/// - Layers must give one tensor whose shape depends on the input's shape alone.
///
/// A collective of `setup.group`. Throws UsageError for an impossible setup: no layers, more stages
/// than layers, a mesh with dimensions other than dp and pp, a plan with an unknown layer name, or
/// a parameter in no layer. Throws MismatchError where the ranks' modules differ.
std::unique_ptr<Strategy> make_pipeline_strategy(const StrategySetup& setup);

/// Its data_share(), from the mesh alone: all ranks of one pipeline share the data. Throws as
/// above.
DataShare pipeline_data_share(const StrategyOptions& options, int rank, int size);

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

/// What StrategyOptions::pipeline_balance can be.
std::vector<std::string> pipeline_balance_names();

}  // namespace lockstep
