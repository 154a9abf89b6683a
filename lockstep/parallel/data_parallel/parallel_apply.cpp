#include "lockstep/parallel/data_parallel/parallel_apply.h"

#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <map>

#include "lockstep/autograd/make_node.h"

namespace lockstep::detail {
namespace {

namespace autograd = torch::autograd;

/// Stands for an input where a replica's graph begins. It leads on to the caller's graph, for
/// gradients of gradients and for tensors that a module keeps aside.
class InputNode : public autograd::Node {
 public:
  explicit InputNode(const at::Tensor& input)
      : Node(autograd::edge_list{autograd::impl::gradient_edge(input)}) {}
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
  /// set_next_edges refuses nodes that are in use already.
  void swap_next(autograd::edge_list& edges) { next_edges_.swap(edges); }
};

struct Part {
  autograd::edge_list outputs;
  autograd::edge_list starts;
  std::vector<InputNode*> inputs;  ///< Those of `starts`, which keep them alive.
};

/// While it lives, the graph of a part ends at its inputs. JoinedGraphs leads on from there: an
/// input that depends on another one, or on a parameter, must not pass its gradient on twice.
class EndAtInputs {
 public:
  explicit EndAtInputs(const Part& part) : part_(part), edges_(part.inputs.size()) { swap(); }
  ~EndAtInputs() { swap(); }
  EndAtInputs(const EndAtInputs&) = delete;
  EndAtInputs& operator=(const EndAtInputs&) = delete;

 private:
  void swap() {
    for (size_t i = 0; i < edges_.size(); ++i) part_.inputs[i]->swap_next(edges_[i]);
  }
  const Part& part_;
  std::vector<autograd::edge_list> edges_;
};

struct Graphs : torch::CustomClassHolder {
  std::shared_ptr<ReplicaThreads> threads;
  std::vector<Part> parts;  ///< By replica.
  bool kept = false;        ///< Gradients of gradients come by once more.
};

/// Whether the graph is kept for another backward. Our own walk of the graph, which is no task of
/// the engine, keeps none.
bool graph_is_kept() {
  return c10::GradMode::is_enabled() || (autograd::get_current_graph_task_id() != -1 &&
                                         autograd::get_current_graph_task_keep_graph());
}

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
    const bool keep = graphs.kept || graph_is_kept();
    std::vector<size_t> first(graphs.parts.size());
    for (size_t i = 1; i < first.size(); ++i) {
      first[i] = first[i - 1] + graphs.parts[i - 1].outputs.size();
    }
    std::vector<autograd::variable_list> found(graphs.parts.size());
    graphs.threads->run(graphs.parts.size(), [&](size_t i) {
      found[i] = run_part(graphs.parts[i], &gradients[first[i]], keep, create);
    });
    autograd::variable_list all(2);  // Of `graphs` and `outputs`.
    for (auto& of_part : found) {
      all.insert(all.end(), std::make_move_iterator(of_part.begin()),
                 std::make_move_iterator(of_part.end()));
    }
    return all;
  }

 private:
  static autograd::variable_list run_part(const Part& part, const at::Tensor* gradients, bool keep,
                                          bool create) {
    autograd::edge_list roots;
    autograd::variable_list values;
    for (size_t k = 0; k < part.outputs.size(); ++k) {
      if (!gradients[k].defined()) continue;
      roots.push_back(part.outputs[k]);
      values.push_back(gradients[k]);
    }
    if (roots.empty() || part.starts.empty()) return autograd::variable_list(part.starts.size());
    const EndAtInputs ends(part);
    return autograd::Engine::get_default_engine().execute(roots, values, keep, create,
                                                          /*accumulate_grad=*/false, part.starts);
  }
};

}  // namespace

bool joins_graphs(const ReplicaThreads& threads, size_t replicas) {
  const auto& devices = threads.devices();
  return replicas > 1 && c10::GradMode::is_enabled() &&
         std::all_of(devices.begin(), devices.end(),
                     [](c10::Device device) { return device.is_cpu(); });
}

std::vector<GraphStart> begin_graph(std::vector<at::Tensor>& inputs) {
  std::vector<GraphStart> starts;
  std::map<const c10::TensorImpl*, at::Tensor> made;  // A tensor may be given twice.
  for (at::Tensor& input : inputs) {
    if (!input.requires_grad()) continue;
    at::Tensor& own = made[input.unsafeGetTensorImpl()];
    if (!own.defined()) {
      own = input.detach();
      autograd::create_gradient_edge(own, make_node<InputNode>(input));
      // One that forward does not see: it may write to the other.
      at::Tensor start = input.detach();
      autograd::impl::set_gradient_edge(start, autograd::impl::gradient_edge(own));
      starts.push_back({input, start});
    }
    input = own;
  }
  return starts;
}

void join_graphs(const std::shared_ptr<ReplicaThreads>& threads,
                 const std::vector<std::vector<GraphStart>>& starts,
                 std::vector<std::vector<at::Tensor>>& outputs) {
  auto graphs = c10::make_intrusive<Graphs>();
  graphs->threads = threads;
  std::vector<at::Tensor> all_starts, all_outputs;
  for (size_t i = 0; i < outputs.size(); ++i) {
    Part& part = graphs->parts.emplace_back();
    for (const GraphStart& start : starts[i]) {
      const bool is_input = start.input.defined();
      const autograd::Edge edge =
          autograd::impl::gradient_edge(is_input ? start.input : start.tensor);
      // Once each: a tied parameter's gradient must not come twice.
      if (std::find(part.starts.begin(), part.starts.end(), edge) != part.starts.end()) continue;
      part.starts.push_back(edge);
      all_starts.push_back(start.tensor);
      if (is_input) part.inputs.push_back(static_cast<InputNode*>(edge.function.get()));
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
