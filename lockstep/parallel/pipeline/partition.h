#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/parallel/strategy.h"

namespace lockstep {

/// Cuts a chain of layers into stages: the first layer of each stage, beginning with 0. Every stage
/// gets a layer at least, and the costliest stage costs as little as it can. Of equal cuts the one
/// with the latest bounds wins. Throws UsageError for more stages than layers.
std::vector<size_t> balance_stages(const std::vector<double>& costs, int num_stages);

/// The stages of a plan that names the layers at which the second and all further stages begin, as
/// PyTorch's split_spec does. Throws UsageError for a name that no layer has (with the nearest),
/// for names out of order and for another number of stages.
std::vector<size_t> planned_stages(const std::vector<Layer>& layers,
                                   const std::vector<std::string>& plan, int num_stages);

/// A guess at what layers cost before any was run: their parameters' elements.
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
