#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/parallel/data_parallel/replicate.h"
#include "lockstep/parallel/output_tensors.h"

namespace lockstep {

/// What a replica of a DataParallel threw, in forward or in backward. The message names the replica
/// and its device, and holds the message of the cause.
class ReplicaError : public Error {
 public:
  ReplicaError(size_t replica, c10::Device device, const std::string& message,
               std::exception_ptr cause, int exit_code);
  size_t replica() const { return replica_; }
  c10::Device device() const { return device_; }
  /// The exception itself, of its own type.
  const std::exception_ptr& cause() const { return cause_; }
  /// The cause's.
  int exit_code() const noexcept override { return exit_code_; }

 private:
  size_t replica_;
  c10::Device device_;
  std::exception_ptr cause_;
  int exit_code_;
};

namespace detail {

/// A thread for each replica, which stay from call to call.
class ReplicaThreads {
 public:
  /// `threads_each`: LibTorch's threads for the operations of one replica, where devices are CPUs.
  /// 0: those of the caller in equal parts, at least 1.
  explicit ReplicaThreads(std::vector<c10::Device> devices, int threads_each = 0);
  ~ReplicaThreads();
  ReplicaThreads(const ReplicaThreads&) = delete;
  ReplicaThreads& operator=(const ReplicaThreads&) = delete;

  const std::vector<c10::Device>& devices() const;
  int threads_each() const;

  /// Calls `work(i)` on the thread of replica i for all i below `count`, and waits for all. The
  /// threads have the caller's thread-local state: grad mode, autocast, current streams. When some
  /// have failed, the first one's failure is thrown as a ReplicaError. Any thread may call, except
  /// these.
  void run(size_t count, const std::function<void(size_t)>& work);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace detail
namespace detail {

/// Where a replica's graph begins.
struct GraphStart {
  at::Tensor tensor;  ///< The caller's.
  at::Tensor input;   ///< Stands for it in the replica's graph; undefined for a parameter.
};

/// Whether replicas on these threads have graphs of their own, of which join_graphs makes one. With
/// other devices than CPUs they have none: there LibTorch's engine has a thread for each device.
bool joins_graphs(const ReplicaThreads& threads, size_t replicas);

/// Begins a replica's graph at these inputs. Those that need a gradient are replaced by tensors of
/// the same memory, which have no more to do with each other or with parameters.
std::vector<GraphStart> begin_graph(std::vector<at::Tensor>& inputs);

/// Makes what replicas computed on the CPU one node of the caller's graph. Its backward runs each
/// replica's part on the thread of that replica, where LibTorch's engine would run all of them on
/// one thread. `starts[i]`: where replica i's graph begins, its parameters and inputs.
/// `outputs[i]`: the tensors that it gave, which are replaced.
void join_graphs(const std::shared_ptr<ReplicaThreads>& threads,
                 const std::vector<std::vector<GraphStart>>& starts,
                 std::vector<std::vector<at::Tensor>>& outputs);

/// Begins the graph of a module's forward, with `inputs` exchanged as begin_graph does.
template <class Module, class Inputs>
std::vector<GraphStart> graph_starts(const Module& module, Inputs& inputs) {
  std::vector<GraphStart> starts;
  for (const at::Tensor& parameter : module.parameters()) {
    if (parameter.requires_grad()) starts.push_back({parameter, {}});
  }
  std::vector<at::Tensor> tensors = tensors_of(inputs);
  for (GraphStart& start : begin_graph(tensors)) starts.push_back(std::move(start));
  replace_tensors(inputs, [&, next = size_t{0}]() mutable { return tensors[next++]; });
  return starts;
}

/// `call(i)` on the thread of replica i, for all i below `count`.
template <class Call>
auto run_replicas(ReplicaThreads& threads, size_t count, const Call& call) {
  using Output = std::decay_t<decltype(call(size_t{0}))>;
  std::vector<std::optional<Output>> given(count);
  threads.run(count, [&](size_t i) { given[i].emplace(call(i)); });
  std::vector<Output> outputs;
  for (auto& output : given) outputs.push_back(std::move(*output));
  return outputs;
}

template <class ModulePtr, class Inputs>
auto apply_modules(const std::shared_ptr<ReplicaThreads>& threads,
                   const std::vector<ModulePtr>& modules, std::vector<Inputs>& inputs) {
  const auto call = [&](size_t i) {
    ModulePtr module = modules[i];  // A const ModuleHolder gives a const module only.
    return std::apply([&](auto&... args) { return module->forward(args...); }, inputs[i]);
  };
  using Output = std::decay_t<decltype(call(size_t{0}))>;
  if (!CarriesTensors<Output> || !joins_graphs(*threads, inputs.size())) {
    return run_replicas(*threads, inputs.size(), call);
  }
  std::vector<std::vector<GraphStart>> starts;
  for (size_t i = 0; i < inputs.size(); ++i) starts.push_back(graph_starts(*modules[i], inputs[i]));
  std::vector<Output> outputs = run_replicas(*threads, inputs.size(), call);
  std::vector<std::vector<at::Tensor>> tensors;
  for (Output& output : outputs) tensors.push_back(tensors_of(output));
  join_graphs(threads, starts, tensors);
  for (size_t i = 0; i < outputs.size(); ++i) {
    replace_tensors(outputs[i], [&, next = size_t{0}]() mutable { return tensors[i][next++]; });
  }
  return outputs;
}

}  // namespace detail

/// Calls `modules[i]->forward(inputs[i]...)` for all i at once, each on a thread of its own, as
/// torch.nn.parallel.parallel_apply, and returns what they gave. `inputs[i]` is the tuple of the
/// arguments. The threads have the caller's grad mode, autocast and streams. Their LibTorch threads
/// are the caller's in equal parts, at least 1. On the CPU backward of the outputs runs on a thread
/// per module as well. `devices` names the modules' devices in errors, and says where streams are
/// taken from. Empty: those of their first parameters.
///
/// Inputs may depend on each other and on the modules' parameters. If gradients are needed, do not
/// use an input again that a module has written to: the caller's graph does not record the write.
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
