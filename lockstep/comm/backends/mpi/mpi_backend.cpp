#include "lockstep/comm/backends/mpi/mpi_backend.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/process_identity.h"
#include "lockstep/comm/backends/tensor_checks.h"

namespace lockstep::mpi {

using namespace backends;
namespace {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

constexpr std::chrono::milliseconds kAbortPatience{300};

/// The element `index` of a contiguous tensor.
void* element(const at::Tensor& tensor, int64_t index) {
  return static_cast<char*>(tensor.data_ptr()) + index * tensor.element_size();
}

int world_rank(const BackendOptions& options, int rank) {
  const auto index = static_cast<size_t>(rank);
  return index < options.global_ranks.size() ? options.global_ranks[index] : rank;
}

std::shared_ptr<Engine> engine_for(const BackendOptions& options) {
  int largest = 0;
  for (int rank = 0; rank < options.size; ++rank)
    largest = std::max(largest, world_rank(options, rank));
  return Engine::get(world_rank(options, options.rank), largest + 1);
}

std::string here_key(int rank) {
  return "mpi/here/" + std::to_string(rank);
}

/// FNV-1a: the same number on all ranks, so that groups formed at once do not mix.
int tag_of(const std::string& name) {
  uint32_t hash = 2166136261u;
  for (const unsigned char c : name) hash = (hash ^ c) * 16777619u;
  return static_cast<int>(hash % 32768);
}

void make_communicator(Group& group) {
  MPI_Group all = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
  check(MPI_Comm_group(MPI_COMM_WORLD, &all), "MPI_Comm_group");
  check(MPI_Group_incl(all, group.size, group.world_ranks.data(), &members), "MPI_Group_incl");
  check(MPI_Comm_create_group(MPI_COMM_WORLD, members, tag_of(group.name), &group.communicator),
        "MPI_Comm_create_group");
  check(MPI_Comm_set_errhandler(group.communicator, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  MPI_Group_free(&members);
  MPI_Group_free(&all);
}

/// All members meet in the store first: there they can be missed, and named, while MPI would wait
/// for ever. What remains for MPI takes no time.
std::shared_ptr<Group> form(const BackendOptions& options, Engine& engine) {
  auto group = std::make_shared<Group>();
  group->name = options.group_name;
  group->rank = options.rank;
  group->size = options.size;
  std::vector<std::string> keys;
  for (int rank = 0; rank < options.size; ++rank) {
    group->world_ranks.push_back(world_rank(options, rank));
    keys.push_back(here_key(rank));
  }
  if (options.size > 1) {
    options.store->set(here_key(options.rank), process_identity());
    options.store->wait(keys, options.timeout);
    for (const auto& key : keys) group->identities.push_back(options.store->get_to_str(key));
  }
  engine.run([group] { make_communicator(*group); }, options.timeout,
             "making the communicator of group '" + group->name + "'");
  return group;
}

}  // namespace

MpiBackend::MpiBackend(const BackendOptions& options, MpiBackendOptions own)
    : c10d::Backend(options.rank, options.size),
      own_(own),
      engine_(engine_for(options)),
      group_(form(options, *engine_)),
      timeout_(options.timeout) {}

MpiBackend::~MpiBackend() {
  close(/*abort=*/false);
}

void MpiBackend::close(bool abort) {
  if (closed_.exchange(true)) return;
  try {
    engine_->retire(group_, abort, abort ? kAbortPatience : timeout_.load() + kAbortPatience);
  } catch (const std::exception&) {
    // MPI has ended before, or does not return: there is nothing left to free.
  }
}

MpiBackend::OwnWork MpiBackend::make_work(Operation operation, Tensors results,
                                          std::chrono::milliseconds timeout) {
  if (closed_)
    throw CommError(std::string(operation_name(operation)) + ": group '" + group_->name +
                    "' is closed");
  MpiWork::Description description;
  description.operation = operation;
  description.results = std::move(results);
  description.timeout = timeout.count() > 0 ? timeout : timeout_.load();
  if (operation < Operation::send)
    description.sequence = sequence_.fetch_add(1, std::memory_order_relaxed) + 1;
  return c10::make_intrusive<MpiWork>(engine_, group_, std::move(description));
}

MpiBackend::WorkPtr MpiBackend::submit(OwnWork work) {
  engine_->submit(work);
  return work;
}

MpiBackend::WorkPtr MpiBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only("broadcast", tensors);
  check_root("broadcast", options.rootRank, getSize());
  const int root = static_cast<int>(options.rootRank);
  const MPI_Datatype type = moved_type(tensor);
  auto work = make_work(Operation::broadcast, tensors, options.timeout);
  const at::Tensor data = getRank() == root ? work->given(tensor, tensor.scalar_type())
                                            : work->taken(tensor, tensor.scalar_type(), false);
  for (int64_t at = 0; at < data.numel(); at += own_.piece) {
    const int count = static_cast<int>(std::min(own_.piece, data.numel() - at));
    work->add("MPI_Ibcast", [=, to = element(data, at)](MPI_Comm comm, MPI_Request* request) {
      return MPI_Ibcast(to, count, type, root, comm, request);
    });
  }
  work->bytes = data.nbytes();
  return submit(work);
}

void MpiBackend::add_all_reduce(MpiWork& work, const char* operation, const at::Tensor& tensor,
                                const c10d::ReduceOp& op) {
  check_dense(operation, tensor);
  const Reduction reduction = reduction_of(tensor.scalar_type(), op);
  at::Tensor data = work.taken(tensor, reduction.dtype, true);
  premultiply(data, op);
  for (int64_t at = 0; at < data.numel(); at += own_.piece) {
    const int count = static_cast<int>(std::min(own_.piece, data.numel() - at));
    work.add("MPI_Iallreduce", [=, to = element(data, at)](MPI_Comm comm, MPI_Request* request) {
      return MPI_Iallreduce(MPI_IN_PLACE, to, count, reduction.type, reduction.op, comm, request);
    });
  }
  work.afterwards([data, op, size = getSize()] { average(data, op, size); });
  work.bytes += data.nbytes();
}

MpiBackend::WorkPtr MpiBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors[0].is_sparse()) return allreduce_sparse(tensors, options);
  const at::Tensor& tensor = only("all_reduce", tensors);
  reduction_of(tensor.scalar_type(), options.reduceOp);
  auto work = make_work(Operation::all_reduce, tensors, options.timeout);
  add_all_reduce(*work, "all_reduce", tensor, options.reduceOp);
  return submit(work);
}

MpiBackend::WorkPtr MpiBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  for (const auto& tensor : tensors) {
    check_dense("all_reduce_coalesced", tensor);
    reduction_of(tensor.scalar_type(), options.reduceOp);
  }
  auto work = make_work(Operation::all_reduce_coalesced, tensors, options.timeout);
  for (const auto& tensor : tensors)
    add_all_reduce(*work, "all_reduce_coalesced", tensor, options.reduceOp);
  return submit(work);
}

MpiBackend::WorkPtr MpiBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only("reduce", tensors);
  check_root("reduce", options.rootRank, getSize());
  const int root = static_cast<int>(options.rootRank);
  const Reduction reduction = reduction_of(tensor.scalar_type(), options.reduceOp);
  auto work = make_work(Operation::reduce, tensors, options.timeout);
  const bool is_root = getRank() == root;
  at::Tensor data =
      is_root ? work->taken(tensor, reduction.dtype, true) : work->given(tensor, reduction.dtype);
  if (options.reduceOp.op_ == c10d::ReduceOp::PREMUL_SUM && !is_root)
    data = work->given(data.clone(), reduction.dtype);
  premultiply(data, options.reduceOp);
  for (int64_t at = 0; at < data.numel(); at += own_.piece) {
    const int count = static_cast<int>(std::min(own_.piece, data.numel() - at));
    work->add("MPI_Ireduce", [=, mine = element(data, at)](MPI_Comm comm, MPI_Request* request) {
      return MPI_Ireduce(is_root ? MPI_IN_PLACE : mine, mine, count, reduction.type, reduction.op,
                         root, comm, request);
    });
  }
  if (is_root) {
    work->afterwards([data, op = options.reduceOp, size = getSize()] { average(data, op, size); });
  }
  work->bytes = data.nbytes();
  return submit(work);
}

void MpiBackend::add_all_gather(MpiWork& work, const char* operation, const at::Tensor& output,
                                const at::Tensor& input) {
  const int count = count_of(operation, input.numel());
  const MPI_Datatype type = moved_type(input);
  const at::Tensor mine = work.given(input, input.scalar_type());
  const at::Tensor all = work.taken(output, output.scalar_type(), false);
  work.bytes += all.nbytes();
  if (count == 0) return;
  work.add("MPI_Iallgather",
           [=, from = mine.data_ptr(), to = all.data_ptr()](MPI_Comm comm, MPI_Request* request) {
             return MPI_Iallgather(from, count, type, to, count, type, comm, request);
           });
}

MpiBackend::WorkPtr MpiBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  const at::Tensor& input = only("all_gather", inputs);
  const Tensors& list = only_list("all_gather", outputs, getSize());
  expect_alike("all_gather", input, list);
  auto work = make_work(Operation::all_gather, list, options.timeout);
  const at::Tensor all = work->fresh({getSize(), input.numel()}, input.options());
  add_all_gather(*work, "all_gather", all, input);
  for (int rank = 0; rank < getSize(); ++rank)
    work->copy_at_end(list[static_cast<size_t>(rank)], all[rank].view(input.sizes()));
  return submit(work);
}

MpiBackend::WorkPtr MpiBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  expect_multiple("all_gather_into_tensor", output, input, getSize());
  auto work = make_work(Operation::all_gather_into_tensor, {output}, options.timeout);
  add_all_gather(*work, "all_gather_into_tensor", output, input);
  return submit(work);
}

MpiBackend::WorkPtr MpiBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const char* name = "all_gather_into_tensor_coalesced";
  if (outputs.size() != inputs.size())
    throw UsageError(std::string(name) + ": as many outputs as inputs are needed");
  for (size_t i = 0; i < inputs.size(); ++i) {
    expect_multiple(name, outputs[i], inputs[i], getSize());
  }
  auto work = make_work(Operation::all_gather_into_tensor_coalesced, outputs, options.timeout);
  for (size_t i = 0; i < inputs.size(); ++i) add_all_gather(*work, name, outputs[i], inputs[i]);
  return submit(work);
}

MpiBackend::WorkPtr MpiBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  // outputs[rank][i]: the i-th input of that rank.
  const char* name = "all_gather_coalesced";
  if (outputs.size() != static_cast<size_t>(getSize()))
    throw UsageError(std::string(name) + ": expected one list a rank");
  Tensors results;
  for (const auto& list : outputs) {
    if (list.size() != inputs.size())
      throw UsageError(std::string(name) + ": expected as many outputs a rank as inputs");
    results.insert(results.end(), list.begin(), list.end());
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_dense(name, inputs[i]);
    for (const auto& list : outputs) expect_alike(name, inputs[i], {list[i]});
  }
  auto work = make_work(Operation::all_gather_coalesced, std::move(results), options.timeout);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor all = work->fresh({getSize(), inputs[i].numel()}, inputs[i].options());
    add_all_gather(*work, name, all, inputs[i]);
    for (int rank = 0; rank < getSize(); ++rank)
      work->copy_at_end(outputs[static_cast<size_t>(rank)][i], all[rank].view(inputs[i].sizes()));
  }
  return submit(work);
}

MpiBackend::WorkPtr MpiBackend::gather(TensorLists& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  const at::Tensor& input = only("gather", inputs);
  check_root("gather", options.rootRank, getSize());
  const int root = static_cast<int>(options.rootRank);
  const bool is_root = getRank() == root;
  Tensors list;
  if (is_root) {
    list = only_list("gather", outputs, getSize());
    expect_alike("gather", input, list);
  } else if (!outputs.empty() && !outputs[0].empty()) {
    throw UsageError("gather: outputs are for the root only");
  }
  const int count = count_of("gather", input.numel());
  const MPI_Datatype type = moved_type(input);
  auto work = make_work(Operation::gather, list, options.timeout);
  const at::Tensor mine = work->given(input, input.scalar_type());
  at::Tensor all;
  if (is_root) all = work->fresh({getSize(), input.numel()}, input.options());
  if (count > 0) {
    work->add("MPI_Igather", [=, from = mine.data_ptr(), to = is_root ? all.data_ptr() : nullptr](
                                 MPI_Comm comm, MPI_Request* request) {
      return MPI_Igather(from, count, type, to, count, type, root, comm, request);
    });
  }
  for (size_t rank = 0; rank < list.size(); ++rank)
    work->copy_at_end(list[rank], all[static_cast<int64_t>(rank)].view(input.sizes()));
  work->bytes = mine.nbytes() * static_cast<size_t>(is_root ? getSize() : 1);
  return submit(work);
}

MpiBackend::WorkPtr MpiBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                        const c10d::ScatterOptions& options) {
  const at::Tensor& output = only("scatter", outputs);
  check_root("scatter", options.rootRank, getSize());
  const int root = static_cast<int>(options.rootRank);
  const bool is_root = getRank() == root;
  Tensors list;
  if (is_root) {
    list = only_list("scatter", inputs, getSize());
    expect_alike("scatter", output, list);
  } else if (!inputs.empty() && !inputs[0].empty()) {
    throw UsageError("scatter: inputs are for the root only");
  }
  const int count = count_of("scatter", output.numel());
  const MPI_Datatype type = moved_type(output);
  auto work = make_work(Operation::scatter, outputs, options.timeout);
  at::Tensor all;
  if (is_root) all = work->given(at::stack(list), output.scalar_type());
  const at::Tensor mine = work->taken(output, output.scalar_type(), false);
  if (count > 0) {
    work->add("MPI_Iscatter", [=, from = is_root ? all.data_ptr() : nullptr, to = mine.data_ptr()](
                                  MPI_Comm comm, MPI_Request* request) {
      return MPI_Iscatter(from, count, type, to, count, type, root, comm, request);
    });
  }
  work->bytes = mine.nbytes() * static_cast<size_t>(is_root ? getSize() : 1);
  return submit(work);
}

void MpiBackend::add_reduce_scatter(MpiWork& work, const char* operation, const at::Tensor& output,
                                    const at::Tensor& input, const c10d::ReduceOp& op) {
  const Reduction reduction = reduction_of(output.scalar_type(), op);
  // Within MPI the whole is counted by an int as well.
  count_of(operation, input.numel());
  const int count = static_cast<int>(output.numel());
  at::Tensor from = work.given(input, reduction.dtype);
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    from = work.given(from.clone(), reduction.dtype);
    premultiply(from, op);
  }
  const at::Tensor to = work.taken(output, reduction.dtype, false);
  if (count > 0) {
    work.add("MPI_Ireduce_scatter_block", [=, first = from.data_ptr(), result = to.data_ptr()](
                                              MPI_Comm comm, MPI_Request* request) {
      return MPI_Ireduce_scatter_block(first, result, count, reduction.type, reduction.op, comm,
                                       request);
    });
  }
  work.afterwards([to, op, size = getSize()] { average(to, op, size); });
  work.bytes += from.nbytes();
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only("reduce_scatter", outputs);
  const Tensors& list = only_list("reduce_scatter", inputs, getSize());
  expect_alike("reduce_scatter", output, list);
  reduction_of(output.scalar_type(), options.reduceOp);
  auto work = make_work(Operation::reduce_scatter, outputs, options.timeout);
  add_reduce_scatter(*work, "reduce_scatter", output, at::stack(list), options.reduceOp);
  return submit(work);
}

MpiBackend::WorkPtr MpiBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  expect_multiple("reduce_scatter_tensor", input, output, getSize());
  reduction_of(output.scalar_type(), options.reduceOp);
  auto work = make_work(Operation::reduce_scatter_tensor, {output}, options.timeout);
  add_reduce_scatter(*work, "reduce_scatter_tensor", output, input, options.reduceOp);
  return submit(work);
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  const char* name = "reduce_scatter_tensor_coalesced";
  if (outputs.size() != inputs.size())
    throw UsageError(std::string(name) + ": as many outputs as inputs are needed");
  for (size_t i = 0; i < inputs.size(); ++i) {
    expect_multiple(name, inputs[i], outputs[i], getSize());
    reduction_of(outputs[i].scalar_type(), options.reduceOp);
  }
  auto work = make_work(Operation::reduce_scatter_tensor_coalesced, outputs, options.timeout);
  for (size_t i = 0; i < inputs.size(); ++i)
    add_reduce_scatter(*work, name, outputs[i], inputs[i], options.reduceOp);
  return submit(work);
}

MpiBackend::WorkPtr MpiBackend::barrier(const c10d::BarrierOptions& options) {
  auto work = make_work(Operation::barrier, {}, options.timeout);
  work->add("MPI_Ibarrier",
            [](MPI_Comm comm, MPI_Request* request) { return MPI_Ibarrier(comm, request); });
  return submit(work);
}

void MpiBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) {
  barrier(options)->wait();
}

}  // namespace lockstep::mpi
