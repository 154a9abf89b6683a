#include "lockstep/comm/backends/hierarchical/hierarchical_backend.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/base/error.h"
#include "lockstep/comm/backends/hierarchical/host_collectives.h"
#include "lockstep/comm/backends/hierarchical/tensor_joining.h"
#include "lockstep/comm/backends/tensor_checks.h"
#include "lockstep/comm/checks/check_context.h"
#include "lockstep/comm/checks/checked_backend.h"

namespace lockstep::hierarchical {

using namespace backends;

namespace {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using Body = CallQueue::Body;

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr());
}

void expect_as_many(const char* operation, size_t outputs, size_t expected) {
  if (outputs == expected) return;
  throw UsageError(std::string(operation) + ": " + std::to_string(outputs) + " outputs, expected " +
                   std::to_string(expected));
}

Body one_after_the_other(std::vector<Body> bodies) {
  return [bodies = std::move(bodies)](Hierarchy& hierarchy) {
    for (const auto& body : bodies) body(hierarchy);
    if (bodies.empty()) hierarchical::barrier(hierarchy);
  };
}

std::shared_ptr<const shm::GroupNames> names_of(const BackendOptions& options) {
  auto names = std::make_shared<shm::GroupNames>();
  names->ranks = options.global_ranks;
  for (int rank = static_cast<int>(names->ranks.size()); rank < options.size; ++rank)
    names->ranks.push_back(rank);
  names->group = options.group_name;
  return names;
}

c10::intrusive_ptr<c10d::Store> flat_store(const BackendOptions& options) {
  return c10::make_intrusive<c10d::PrefixStore>("flat", options.store);
}

// Through it the flat group's failures are known to the hierarchy and the other way round.
std::shared_ptr<CheckContext> flat_checks(const BackendOptions& options) {
  auto checks =
      std::make_shared<CheckContext>(flat_store(options), options.rank, options.size,
                                     options.global_ranks, options.group_name, options.timeout);
  checks->connect();  // FirstFailure needs it when the store's host may be gone.
  return checks;
}

c10::intrusive_ptr<c10d::Backend> make_flat(const BackendOptions& options,
                                            const std::shared_ptr<CheckContext>& context) {
  BackendOptions flat = options;
  flat.store = flat_store(options);
  CheckedBackendOptions checks;
  checks.debug = options.debug;
  checks.global_ranks = options.global_ranks;
  checks.timeout = options.timeout;
  checks.group_name = options.group_name;
  checks.announced = true;
  checks.context = context;
  announce_checks(*flat.store, options.rank, options.group_name, options.debug);
  try {
    return make_checked_backend(options.factory("gloo", flat), flat.store, checks);
  } catch (const std::exception&) {
    if (const auto failure = context->seen_failure())
      throw_failure(context->me() + ": forming group '" + options.group_name + "' failed: ",
                    *failure);
    throw;
  }
}

}  // namespace

HierarchicalBackend::HierarchicalBackend(const BackendOptions& options, const HostLayout& layout,
                                         const std::vector<Member>& members)
    : c10d::Backend(options.rank, options.size),
      names_(names_of(options)),
      timeout_(options.timeout),
      checks_(flat_checks(options)),
      hierarchy_(options, layout, members, checks_),
      queue_(hierarchy_),
      flat_(make_flat(options, checks_)) {}

HierarchicalBackend::~HierarchicalBackend() {
  queue_.close();
}

void HierarchicalBackend::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  flat_->setTimeout(timeout);
}

HierarchicalBackend::OwnWork HierarchicalBackend::make_work(shm::Request request,
                                                            std::chrono::milliseconds timeout) {
  return c10::make_intrusive<shm::ShmWork>(getRank(), std::move(request), names_,
                                           timeout.count() > 0 ? timeout : timeout_.load());
}

HierarchicalBackend::WorkPtr HierarchicalBackend::submit(const OwnWork& work, Body body,
                                                         bool async) {
  work->set_sequence(sequence_.fetch_add(1, std::memory_order_relaxed) + 1);
  queue_.submit(work, std::move(body), !async);
  return work;
}

HierarchicalBackend::WorkPtr HierarchicalBackend::broadcast(Tensors& tensors,
                                                            const c10d::BroadcastOptions& options) {
  only("broadcast", tensors);
  if (options.rootRank < 0 || options.rootRank >= getSize())
    throw UsageError("broadcast: root " + std::to_string(options.rootRank) +
                     " is out of range; the group has ranks 0 to " + std::to_string(getSize() - 1));
  const int root = static_cast<int>(options.rootRank);
  auto work = make_work({.operation = Operation::broadcast, .root = root, .inputs = tensors},
                        options.timeout);
  const at::Tensor data =
      getRank() == root ? work->given(tensors[0]) : work->taken(tensors[0], false);
  return submit(
      work,
      [data, root](Hierarchy& hierarchy) {
        hierarchical::broadcast(hierarchy, bytes_of(data), data.nbytes(), root);
      },
      options.asyncOp);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::allreduce(Tensors& tensors,
                                                            const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors[0].is_sparse()) return allreduce_sparse(tensors, options);
  const at::Tensor& tensor = only("all_reduce", tensors);
  auto joining = joining_of(tensor, options.reduceOp, getSize());
  auto work = make_work({.operation = Operation::all_reduce,
                         .reduction = static_cast<int>(options.reduceOp.op_),
                         .inputs = tensors},
                        options.timeout);
  const at::Tensor data = work->taken(tensor, true);
  return submit(
      work,
      [data, joining = std::move(joining)](Hierarchy& hierarchy) {
        hierarchical::all_reduce(hierarchy, bytes_of(data), static_cast<size_t>(data.numel()),
                                 joining);
      },
      options.asyncOp);
}

// Tensors of one dtype travel as one: what is small costs a message between hosts each otherwise.
HierarchicalBackend::WorkPtr HierarchicalBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  auto work = make_work({.operation = Operation::all_reduce_coalesced,
                         .reduction = static_cast<int>(options.reduceOp.op_),
                         .inputs = tensors},
                        options.timeout);
  std::vector<Tensors> alike;
  for (const auto& tensor : tensors) {
    check_dense("all_reduce_coalesced", tensor);
    const auto same = [&](const Tensors& list) {
      return list[0].scalar_type() == tensor.scalar_type();
    };
    const auto list = std::find_if(alike.begin(), alike.end(), same);
    list == alike.end() ? alike.push_back({tensor}) : list->push_back(tensor);
  }
  std::vector<Body> bodies;
  for (const auto& list : alike) {
    auto joining = joining_of(list[0], options.reduceOp, getSize());
    bodies.push_back([list, joining = std::move(joining)](Hierarchy& hierarchy) {
      Tensors parts;
      for (const auto& tensor : list) parts.push_back(tensor.reshape({-1}));
      const at::Tensor flat = at::cat(parts);
      hierarchical::all_reduce(hierarchy, bytes_of(flat), static_cast<size_t>(flat.numel()),
                               joining);
      int64_t at = 0;
      for (const auto& tensor : list) {
        tensor.copy_(flat.narrow(0, at, tensor.numel()).view(tensor.sizes()));
        at += tensor.numel();
      }
    });
  }
  return submit(work, one_after_the_other(std::move(bodies)), options.asyncOp);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                                            const c10d::AllgatherOptions& options) {
  const at::Tensor& input = only("all_gather", inputs);
  const Tensors& list = only_list("all_gather", outputs, getSize());
  expect_alike("all_gather", input, list);
  auto work = make_work({.operation = Operation::all_gather, .inputs = inputs, .outputs = list},
                        options.timeout);
  const at::Tensor data = work->given(input);
  std::vector<std::byte*> targets;
  for (const auto& output : list) targets.push_back(bytes_of(work->taken(output, false)));
  return submit(
      work,
      [data, targets = std::move(targets)](Hierarchy& hierarchy) {
        hierarchical::all_gather(hierarchy, bytes_of(data), data.nbytes(), targets);
      },
      options.asyncOp);
}

Body HierarchicalBackend::gather_into(shm::ShmWork& work, const at::Tensor& output,
                                      const at::Tensor& input) {
  const at::Tensor data = work.given(input), all = work.taken(output, false);
  std::vector<std::byte*> targets;
  for (int rank = 0; rank < getSize(); ++rank)
    targets.push_back(bytes_of(all) + static_cast<size_t>(rank) * data.nbytes());
  return [data, all, targets = std::move(targets)](Hierarchy& hierarchy) {
    hierarchical::all_gather(hierarchy, bytes_of(data), data.nbytes(), targets);
  };
}

HierarchicalBackend::WorkPtr HierarchicalBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  expect_multiple("all_gather_into_tensor", output, input, getSize());
  auto work = make_work(
      {.operation = Operation::all_gather_into_tensor, .inputs = {input}, .outputs = {output}},
      options.timeout);
  auto body = gather_into(*work, output, input);
  return submit(work, std::move(body), options.asyncOp);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const char* name = "all_gather_into_tensor_coalesced";
  expect_as_many(name, outputs.size(), inputs.size());
  auto work = make_work({.operation = Operation::all_gather_into_tensor_coalesced,
                         .inputs = inputs,
                         .outputs = outputs},
                        options.timeout);
  std::vector<Body> bodies;
  for (size_t i = 0; i < inputs.size(); ++i) {
    expect_multiple(name, outputs[i], inputs[i], getSize());
    bodies.push_back(gather_into(*work, outputs[i], inputs[i]));
  }
  return submit(work, one_after_the_other(std::move(bodies)), options.asyncOp);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  // outputs[rank][i]: the i-th input of that rank.
  const char* name = "all_gather_coalesced";
  expect_as_many(name, outputs.size(), static_cast<size_t>(getSize()));
  shm::Request request{.operation = Operation::all_gather_coalesced, .inputs = inputs};
  for (const auto& list : outputs) {
    expect_as_many(name, list.size(), inputs.size());
    request.outputs.insert(request.outputs.end(), list.begin(), list.end());
  }
  auto work = make_work(std::move(request), options.timeout);
  std::vector<Body> bodies;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_dense(name, inputs[i]);
    const at::Tensor data = work->given(inputs[i]);
    std::vector<std::byte*> targets;
    for (const auto& list : outputs) {
      check_dense(name, list[i]);
      expect_alike(name, inputs[i], {list[i]});
      targets.push_back(bytes_of(work->taken(list[i], false)));
    }
    bodies.push_back([data, targets = std::move(targets)](Hierarchy& hierarchy) {
      hierarchical::all_gather(hierarchy, bytes_of(data), data.nbytes(), targets);
    });
  }
  return submit(work, one_after_the_other(std::move(bodies)), options.asyncOp);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::reduce_scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only("reduce_scatter", outputs);
  const Tensors& list = only_list("reduce_scatter", inputs, getSize());
  expect_alike("reduce_scatter", output, list);
  auto joining = joining_of(output, options.reduceOp, getSize());
  auto work = make_work({.operation = Operation::reduce_scatter,
                         .reduction = static_cast<int>(options.reduceOp.op_),
                         .inputs = list,
                         .outputs = outputs},
                        options.timeout);
  std::vector<const std::byte*> sources;
  for (const auto& input : list) sources.push_back(bytes_of(work->given(input)));
  const at::Tensor data = work->taken(output, false);
  return submit(
      work,
      [data, sources = std::move(sources), joining = std::move(joining)](Hierarchy& hierarchy) {
        hierarchical::reduce_scatter(hierarchy, sources, bytes_of(data),
                                     static_cast<size_t>(data.numel()), joining);
      },
      options.asyncOp);
}

Body HierarchicalBackend::scatter_from(shm::ShmWork& work, const at::Tensor& output,
                                       const at::Tensor& input, const c10d::ReduceOp& op) {
  auto joining = joining_of(output, op, getSize());
  const at::Tensor data = work.taken(output, false), all = work.given(input);
  std::vector<const std::byte*> sources;
  for (int rank = 0; rank < getSize(); ++rank)
    sources.push_back(bytes_of(all) + static_cast<size_t>(rank) * data.nbytes());
  return [data, all, sources = std::move(sources),
          joining = std::move(joining)](Hierarchy& hierarchy) {
    hierarchical::reduce_scatter(hierarchy, sources, bytes_of(data),
                                 static_cast<size_t>(data.numel()), joining);
  };
}

HierarchicalBackend::WorkPtr HierarchicalBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  expect_multiple("reduce_scatter_tensor", input, output, getSize());
  auto work = make_work({.operation = Operation::reduce_scatter_tensor,
                         .reduction = static_cast<int>(options.reduceOp.op_),
                         .inputs = {input},
                         .outputs = {output}},
                        options.timeout);
  auto body = scatter_from(*work, output, input, options.reduceOp);
  return submit(work, std::move(body), options.asyncOp);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  const char* name = "reduce_scatter_tensor_coalesced";
  expect_as_many(name, outputs.size(), inputs.size());
  auto work = make_work({.operation = Operation::reduce_scatter_tensor_coalesced,
                         .reduction = static_cast<int>(options.reduceOp.op_),
                         .inputs = inputs,
                         .outputs = outputs},
                        options.timeout);
  std::vector<Body> bodies;
  for (size_t i = 0; i < inputs.size(); ++i) {
    expect_multiple(name, inputs[i], outputs[i], getSize());
    bodies.push_back(scatter_from(*work, outputs[i], inputs[i], options.reduceOp));
  }
  return submit(work, one_after_the_other(std::move(bodies)), options.asyncOp);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::barrier(const c10d::BarrierOptions& options) {
  auto work = make_work({.operation = Operation::barrier}, options.timeout);
  return submit(work, hierarchical::barrier, options.asyncOp);
}

void HierarchicalBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) {
  // Every wait names who is missing, so there is nothing more to monitor.
  auto work = make_work({.operation = Operation::monitored_barrier}, options.timeout);
  submit(work, hierarchical::barrier, false)->wait();
}

HierarchicalBackend::WorkPtr HierarchicalBackend::allreduce_sparse(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  return flat_->allreduce_sparse(tensors, options);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::reduce(Tensors& tensors,
                                                         const c10d::ReduceOptions& options) {
  return flat_->reduce(tensors, options);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::gather(TensorLists& outputs, Tensors& inputs,
                                                         const c10d::GatherOptions& options) {
  return flat_->gather(outputs, inputs, options);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                                          const c10d::ScatterOptions& options) {
  return flat_->scatter(outputs, inputs, options);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  return flat_->alltoall_base(output, input, output_splits, input_splits, options);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllToAllOptions& options) {
  return flat_->alltoall(outputs, inputs, options);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::send(Tensors& tensors, int dst, int tag) {
  return flat_->send(tensors, dst, tag);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::recv(Tensors& tensors, int src, int tag) {
  return flat_->recv(tensors, src, tag);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::recvAnysource(Tensors& tensors, int tag) {
  return flat_->recvAnysource(tensors, tag);
}

void HierarchicalBackend::abort() {
  hierarchy_.abort("has given the group up");
  queue_.close();
  hierarchy_.leave();
  flat_->abort();
}

void HierarchicalBackend::shutdown() {
  queue_.close();
  hierarchy_.leave();
  flat_->shutdown();
}

}  // namespace lockstep::hierarchical
