#include "lockstep/parallel/data_parallel/data_parallel.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <optional>

#include "lockstep/autograd/backward_hook.h"

namespace lockstep::detail {
namespace {

namespace autograd = torch::autograd;

struct GraphPart {
  size_t first;  ///< Of its outputs, among all parts'.
  autograd::edge_list outputs;
  autograd::edge_list starts;
};

struct Graphs : torch::CustomClassHolder {
  std::shared_ptr<ReplicaThreads> threads;
  std::vector<GraphPart> parts;  ///< By replica.
  bool kept = false;             ///< Gradients of gradients come by once more.
};

/// From all replicas' starts to all replicas' outputs, replica after replica.
class JoinedGraphs : public autograd::Function<JoinedGraphs> {
 public:
  static autograd::variable_list forward(autograd::AutogradContext* context,
                                         const c10::intrusive_ptr<Graphs>& graphs,
                                         const std::vector<at::Tensor>& outputs, at::TensorList) {
    context->set_materialize_grads(false);
    context->saved_data["graphs"] = c10::IValue::make_capsule(graphs);
    autograd::variable_list joined;
    for (const at::Tensor& output : outputs) joined.push_back(output.detach());
    return joined;
  }

  static autograd::variable_list backward(autograd::AutogradContext* context,
                                          autograd::variable_list gradients) {
    const auto holder = context->saved_data["graphs"].toCapsule();
    auto& graphs = static_cast<Graphs&>(*holder);
    const bool create = c10::GradMode::is_enabled();
    graphs.kept = graphs.kept || create;
    const bool keep = graphs.kept || keeps_graph();
    std::vector<autograd::variable_list> found(graphs.parts.size());
    graphs.threads->run(graphs.parts.size(), [&](size_t i) {
      found[i] = run_part(graphs.parts[i], gradients, keep, create);
    });
    autograd::variable_list all(2);  // Of `graphs` and `outputs`.
    for (auto& of_part : found) {
      all.insert(all.end(), std::make_move_iterator(of_part.begin()),
                 std::make_move_iterator(of_part.end()));
    }
    return all;
  }

 private:
  static autograd::variable_list run_part(const GraphPart& part,
                                          const autograd::variable_list& gradients, bool keep,
                                          bool create) {
    autograd::edge_list roots;
    autograd::variable_list values;
    for (size_t k = 0; k < part.outputs.size(); ++k) {
      const at::Tensor& gradient = gradients[part.first + k];
      if (!gradient.defined()) continue;
      roots.push_back(part.outputs[k]);
      values.push_back(gradient);
    }
    if (roots.empty() || part.starts.empty()) return autograd::variable_list(part.starts.size());
    return autograd::Engine::get_default_engine().execute(roots, values, keep, create,
                                                          /*accumulate_grad=*/false, part.starts);
  }
};

}  // namespace

void join_graphs(const std::shared_ptr<ReplicaThreads>& threads,
                 const std::vector<std::vector<at::Tensor>>& parameters,
                 const std::vector<std::vector<at::Tensor>>& inputs,
                 std::vector<std::vector<at::Tensor>>& outputs) {
  if (outputs.size() < 2 || !c10::GradMode::is_enabled()) return;
  if (!std::ranges::all_of(threads->devices(), &c10::Device::is_cpu)) return;
  for (const auto& of_replica : inputs) {
    if (std::ranges::any_of(of_replica, &at::Tensor::requires_grad)) return;
  }
  auto graphs = c10::make_intrusive<Graphs>();
  graphs->threads = threads;
  std::vector<at::Tensor> all_starts, all_outputs;
  for (size_t i = 0; i < outputs.size(); ++i) {
    GraphPart& part = graphs->parts.emplace_back(GraphPart{all_outputs.size(), {}, {}});
    for (const at::Tensor& parameter : parameters[i]) {
      if (!parameter.requires_grad()) continue;
      const autograd::Edge edge = autograd::impl::gradient_edge(parameter);
      // Once each: a tied parameter's gradient must not come twice.
      if (std::find(part.starts.begin(), part.starts.end(), edge) != part.starts.end()) continue;
      part.starts.push_back(edge);
      all_starts.push_back(parameter);
    }
    for (const at::Tensor& output : outputs[i]) {
      if (!output.requires_grad()) continue;
      part.outputs.push_back(autograd::impl::gradient_edge(output));
      all_outputs.push_back(output);
    }
  }
  if (all_starts.empty() || all_outputs.empty()) return;
  const auto joined = JoinedGraphs::apply(graphs, all_outputs, at::TensorList(all_starts));
  size_t next = 0;
  for (auto& of_replica : outputs) {
    for (at::Tensor& output : of_replica) {
      if (output.requires_grad()) output = joined[next++];
    }
  }
}

}  // namespace lockstep::detail

namespace lockstep {
namespace {

[[noreturn]] void throw_replica_error(size_t replica, c10::Device device,
                                      const std::exception_ptr& failure) {
  std::string message = "an exception that is no std::exception";
  int exit_code = kExitFailure;
  try {
    std::rethrow_exception(failure);
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  } catch (const std::exception& error) {
    message = error.what();
    exit_code = exit_code_of(error);
  } catch (...) {  // NOLINT(bugprone-empty-catch): the message says it.
  }
  throw ReplicaError(replica, device, message, failure, exit_code);
}

}  // namespace

ReplicaError::ReplicaError(size_t replica, c10::Device device, const std::string& message,
                           std::exception_ptr cause, int exit_code)
    : Error("replica " + std::to_string(replica) + " on device " + device.str() + ": " + message),
      replica_(replica),
      device_(device),
      cause_(std::move(cause)),
      exit_code_(exit_code) {}

namespace detail {

ReplicaThreads::ReplicaThreads(std::vector<c10::Device> devices, int threads_each)
    : devices_(std::move(devices)) {
  const int callers = at::get_num_threads();
  const int each =
      threads_each > 0 ? threads_each : std::max(1, callers / static_cast<int>(devices_.size()));
  for (const c10::Device device : devices_) {
    threads_.push_back(std::make_unique<c10::ThreadPool>(1, /*numa_node_id=*/-1, [device, each] {
      if (!device.is_cpu()) return;
      at::get_num_threads();  // A thread's first look at its number sets it to the last one set.
      at::set_num_threads(each);
    }));
  }
  run(devices_.size(), [](size_t) {});  // All have set their number.
  // The last number that any thread has set is the one with which new threads start.
  at::set_num_threads(callers);
}

void ReplicaThreads::run(size_t count, const std::function<void(size_t)>& work) {
  const std::lock_guard one_caller(one_caller_);
  const at::ThreadLocalState state;
  std::vector<std::optional<c10::Stream>> streams(count);
  for (size_t i = 0; i < count; ++i) {
    if (devices_[i].is_cpu()) continue;
    streams[i] = c10::impl::VirtualGuardImpl(devices_[i].type()).getStream(devices_[i]);
  }
  std::vector<std::exception_ptr> failures(count);
  for (size_t i = 0; i < count; ++i) {
    threads_[i]->run([&, i] {
      try {
        const at::ThreadLocalStateGuard same_state(state);
        const c10::OptionalStreamGuard stream(streams[i]);
        work(i);
      } catch (...) {
        failures[i] = std::current_exception();
      }
    });
  }
  for (size_t i = 0; i < count; ++i) threads_[i]->waitWorkComplete();
  for (size_t i = 0; i < count; ++i) {
    if (failures[i]) throw_replica_error(i, devices_[i], failures[i]);
  }
}

}  // namespace detail
}  // namespace lockstep
