#include "lockstep/parallel/pipeline/pipeline_strategy.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <c10/util/ScopeExit.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "lockstep/autograd/backward.h"
#include "lockstep/autograd/recorded_state.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"

namespace lockstep {
namespace {

void check_layers(size_t layers, int num_stages) {
  if (num_stages >= 1 && static_cast<size_t>(num_stages) <= layers) return;
  throw UsageError("pipeline: " + counted(num_stages, "stage") + " cannot be made of " +
                       counted(static_cast<int64_t>(layers), "layer"),
                   "take as many stages as layers, or fewer: fewer ranks in dimension pp, or fewer "
                   "stages a rank");
}

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// One run of all layers, each from its input's copy to its gradients.
std::vector<double> seconds_of_layers(const std::vector<Layer>& layers, const at::Tensor& input,
                                      const ForwardContext& context,
                                      const std::function<double()>& now) {
  std::vector<double> seconds;
  at::Tensor x = input.detach();
  for (const Layer& layer : layers) {
    const double start = now();
    const auto entered = context ? context() : nullptr;
    const at::Tensor output = layer.forward(x);
    if (output.requires_grad()) backward(output, at::ones_like(output));
    seconds.push_back(now() - start);
    x = output.detach();
    if (x.is_floating_point()) x.set_requires_grad(true);
  }
  return seconds;
}

}  // namespace

std::vector<size_t> balance_stages(const std::vector<double>& costs, int num_stages) {
  check_layers(costs.size(), num_stages);
  const size_t layers = costs.size();
  std::vector<double> sums(layers + 1, 0.0);
  for (size_t i = 0; i < layers; ++i) sums[i + 1] = sums[i] + costs[i];
  // best[end]: the cost of the costliest stage when the first `end` layers form the stages so far.
  std::vector<double> best(layers + 1, std::numeric_limits<double>::infinity());
  std::vector<std::vector<size_t>> first_of_last(static_cast<size_t>(num_stages),
                                                 std::vector<size_t>(layers + 1, 0));
  for (size_t end = 1; end <= layers; ++end) best[end] = sums[end];
  for (size_t stage = 1; stage < static_cast<size_t>(num_stages); ++stage) {
    std::vector<double> next(layers + 1, std::numeric_limits<double>::infinity());
    for (size_t end = stage + 1; end <= layers; ++end) {
      for (size_t first = stage; first < end; ++first) {
        const double cost = std::max(best[first], sums[end] - sums[first]);
        if (cost <= next[end]) {
          next[end] = cost;
          first_of_last[stage][end] = first;
        }
      }
    }
    best = std::move(next);
  }
  std::vector<size_t> starts(static_cast<size_t>(num_stages), 0);
  size_t end = layers;
  for (auto stage = static_cast<size_t>(num_stages); stage-- > 1;) {
    end = starts[stage] = first_of_last[stage][end];
  }
  return starts;
}

std::vector<size_t> planned_stages(const std::vector<Layer>& layers,
                                   const std::vector<std::string>& plan, int num_stages) {
  check_layers(layers.size(), num_stages);
  std::vector<std::string> names;
  for (const Layer& layer : layers) names.push_back(layer.name);
  std::vector<size_t> starts{0};
  for (const std::string& name : plan) {
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) {
      throw UsageError("pipeline plan: " + unknown_word("layer", name, names),
                       "the layers are " + join(names, ", "));
    }
    const auto start = static_cast<size_t>(found - names.begin());
    if (start <= starts.back()) {
      throw UsageError("pipeline plan: a stage cannot begin at layer '" + name +
                           "', which does not come after layer '" + names[starts.back()] + "'",
                       "name the first layers of the second and all further stages, in order");
    }
    starts.push_back(start);
  }
  if (static_cast<int>(starts.size()) != num_stages) {
    throw UsageError("pipeline plan: it names the first layers of " +
                         counted(static_cast<int64_t>(plan.size()), "stage") +
                         ", which with the "
                         "first one makes " +
                         std::to_string(starts.size()) + ", but there are " +
                         std::to_string(num_stages),
                     "name one layer fewer than there are stages");
  }
  return starts;
}

std::vector<std::string> pipeline_balance_names() {
  return {"time", "parameters"};
}

std::vector<double> estimate_layer_costs(const std::vector<Layer>& layers) {
  std::vector<double> costs;
  for (const Layer& layer : layers) {
    double elements = 1;  // Also a layer without parameters takes some time.
    if (layer.module) {
      for (const at::Tensor& parameter : layer.module->parameters()) {
        elements += static_cast<double>(parameter.numel());
      }
    }
    costs.push_back(elements);
  }
  return costs;
}

std::vector<double> measure_layer_costs(const std::vector<Layer>& layers, const at::Tensor& input,
                                        const ForwardContext& context,
                                        const std::function<double()>& now) {
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers, gradients;
  for (const Layer& layer : layers) {
    if (!layer.module) continue;
    for (const at::Tensor& buffer : layer.module->buffers())
      buffers.emplace_back(buffer, buffer.clone());
    for (const at::Tensor& parameter : layer.module->parameters()) {
      gradients.emplace_back(parameter, parameter.grad());
      parameter.mutable_grad() = at::Tensor();
    }
  }
  const RecordedState::Replay random(RecordedState::record({}, /*random=*/true));
  const auto put_back = c10::make_scope_exit([&] {
    const at::NoGradGuard no_grad;
    for (auto& [buffer, before] : buffers) buffer.copy_(before);
    for (auto& [parameter, gradient] : gradients) parameter.mutable_grad() = gradient;
  });
  constexpr int kRuns = 4;  // The first one warms up caches.
  std::vector<double> least;
  for (int run = 0; run < kRuns; ++run) {
    const std::vector<double> seconds =
        seconds_of_layers(layers, input, context, now ? now : steady_seconds);
    if (least.empty()) least = seconds;
    for (size_t i = 0; i < least.size(); ++i) least[i] = std::min(least[i], seconds[i]);
  }
  return least;
}

}  // namespace lockstep
