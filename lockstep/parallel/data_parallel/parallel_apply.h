#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/parallel/data_parallel/replica_threads.h"
#include "lockstep/parallel/data_parallel/replicate.h"
#include "lockstep/parallel/data_parallel/scatter_gather.h"
#include "lockstep/parallel/output_tensors.h"

namespace lockstep {
namespace detail {

/// Makes what replicas computed on the CPU one node of the caller's graph. Its backward runs each
/// replica's part on the thread of that replica, where LibTorch's engine would run all of them on
/// one thread. `starts[i]`: where replica i's graph begins, its parameters and inputs.
/// `outputs[i]`: the tensors that it gave, which are replaced. With other devices nothing is done:
/// there the engine has a thread for each device.
void join_graphs(const std::shared_ptr<ReplicaThreads>& threads,
                 const std::vector<std::vector<at::Tensor>>& starts,
                 std::vector<std::vector<at::Tensor>>& outputs);

/// `call(i)` on the thread of replica i, for as many replicas as `starts` has.
template <class Call>
auto run_replicas(const std::shared_ptr<ReplicaThreads>& threads,
                  const std::vector<std::vector<at::Tensor>>& starts, const Call& call) {
  using Output = std::decay_t<decltype(call(size_t{0}))>;
  std::vector<std::optional<Output>> given(starts.size());
  threads->run(given.size(), [&](size_t i) { given[i].emplace(call(i)); });
  std::vector<Output> outputs;
  for (auto& output : given) outputs.push_back(std::move(*output));
  if (CarriesTensors<Output> && c10::GradMode::is_enabled()) {
    std::vector<std::vector<at::Tensor>> tensors;
    for (Output& output : outputs) tensors.push_back(tensors_of(output));
    join_graphs(threads, starts, tensors);
    for (size_t i = 0; i < outputs.size(); ++i) {
      replace_tensors(outputs[i], [&, next = size_t{0}]() mutable { return tensors[i][next++]; });
    }
  }
  return outputs;
}

/// Where the graph of a module's forward begins.
template <class Module, class Inputs>
std::vector<at::Tensor> graph_starts(const Module& module, Inputs& inputs) {
  std::vector<at::Tensor> starts;
  if (!c10::GradMode::is_enabled()) return starts;
  const auto take = [&](const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.requires_grad()) starts.push_back(tensor);
    }
  };
  take(module.parameters());
  take(tensors_of(inputs));
  return starts;
}

template <class ModulePtr, class Inputs>
auto apply_modules(const std::shared_ptr<ReplicaThreads>& threads,
                   const std::vector<ModulePtr>& modules, std::vector<Inputs>& inputs) {
  std::vector<std::vector<at::Tensor>> starts;
  for (size_t i = 0; i < inputs.size(); ++i) starts.push_back(graph_starts(*modules[i], inputs[i]));
  return run_replicas(threads, starts, [&](size_t i) {
    ModulePtr module = modules[i];  // A const ModuleHolder gives a const module only.
    return std::apply([&](auto&... args) { return module->forward(args...); }, inputs[i]);
  });
}

}  // namespace detail

/// Calls `modules[i]->forward(inputs[i]...)` for all i at once, each on a thread of its own, as
/// torch.nn.parallel.parallel_apply, and returns what they gave. `inputs[i]` is the tuple of the
/// arguments. The threads have the caller's grad mode, autocast and streams. Their LibTorch threads
/// are the caller's in equal parts, at least 1. On the CPU backward of the outputs runs on a thread
/// per module as well. `devices` names the modules' devices in errors, and says where streams are
/// taken from. Empty: those of their first parameters.
///
/// Throws ReplicaError when a module throws, and UsageError for lists of different lengths.
template <class ModulePtr, class... Args>
auto parallel_apply(const std::vector<ModulePtr>& modules,
                    const std::vector<std::tuple<Args...>>& inputs,
                    std::vector<c10::Device> devices = {}) {
  if (devices.empty()) {
    for (const ModulePtr& module : modules) {
      const auto parameters = module->parameters();
      devices.push_back(parameters.empty() ? c10::Device(c10::kCPU) : parameters.front().device());
    }
  }
  if (modules.empty() || modules.size() != inputs.size() || modules.size() != devices.size()) {
    throw UsageError("parallel_apply: " + std::to_string(modules.size()) + " modules, " +
                     std::to_string(inputs.size()) + " inputs and " +
                     std::to_string(devices.size()) +
                     " devices; expected equally many, at least one");
  }
  auto arguments = inputs;
  return detail::apply_modules(std::make_shared<detail::ReplicaThreads>(std::move(devices)),
                               modules, arguments);
}

/// The same for modules of one argument, a tensor.
template <class ModulePtr>
auto parallel_apply(const std::vector<ModulePtr>& modules, const std::vector<at::Tensor>& inputs,
                    std::vector<c10::Device> devices = {}) {
  std::vector<std::tuple<at::Tensor>> tuples(inputs.begin(), inputs.end());
  return lockstep::parallel_apply(modules, tuples, std::move(devices));
}

}  // namespace lockstep
