#include "lockstep/parallel/data_parallel/parallel_apply.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace lockstep::detail {
namespace {

namespace autograd = torch::autograd;

struct Part {
  autograd::edge_list outputs;
  autograd::edge_list starts;
};

struct Graphs : torch::CustomClassHolder {
  std::shared_ptr<ReplicaThreads> threads;
  std::vector<Part> parts;  ///< By replica.
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
    const auto& graphs = static_cast<const Graphs&>(*holder);
    const bool create = c10::GradMode::is_enabled(), keep = graph_is_kept();
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
    return autograd::Engine::get_default_engine().execute(roots, values, keep, create,
                                                          /*accumulate_grad=*/false, part.starts);
  }
};

}  // namespace

void join_graphs(const std::shared_ptr<ReplicaThreads>& threads,
                 const std::vector<std::vector<at::Tensor>>& starts,
                 std::vector<std::vector<at::Tensor>>& outputs) {
  const auto& devices = threads->devices();
  const bool on_cpu = std::all_of(devices.begin(), devices.end(),
                                  [](c10::Device device) { return device.is_cpu(); });
  if (!on_cpu || outputs.size() < 2) return;

  auto graphs = c10::make_intrusive<Graphs>();
  graphs->threads = threads;
  std::vector<at::Tensor> all_starts, all_outputs;
  for (size_t i = 0; i < outputs.size(); ++i) {
    Part& part = graphs->parts.emplace_back();
    for (const at::Tensor& start : starts[i]) {
      const autograd::Edge edge = autograd::impl::gradient_edge(start);
      // Once each: a tied parameter's gradient must not come twice.
      if (std::find(part.starts.begin(), part.starts.end(), edge) != part.starts.end()) continue;
      part.starts.push_back(edge);
      all_starts.push_back(start);
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
