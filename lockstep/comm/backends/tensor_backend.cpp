#include "lockstep/comm/backends/tensor_backend.h"

#include <ATen/ATen.h>

#include <string>

#include "lockstep/base/error.h"
#include "lockstep/comm/backends/tensor_checks.h"

namespace lockstep::backends {
namespace {

using WorkPtr = TensorBackend::WorkPtr;

/// The root's list; on the other ranks there is none.
Tensors list_of_root(Operation operation, const TensorLists& lists, int size, bool is_root) {
  if (is_root) return only_list(operation, lists, size);
  if (!lists.empty()) expect_count(operation, "tensors in the root's list", lists[0].size(), 0);
  return {};
}

/// A contiguous tensor cut into rows.
Buffers cut(const at::Tensor& tensor, const std::vector<int64_t>& rows) {
  const int64_t all = tensor.dim() == 0 ? 1 : tensor.size(0);
  const int64_t row = all == 0 ? 0 : tensor.numel() / all;
  auto* data = static_cast<std::byte*>(tensor.data_ptr());
  Buffers buffers;
  for (const int64_t count : rows) {
    const size_t bytes = static_cast<size_t>(count * row) * tensor.element_size();
    buffers.push_back({data, bytes});
    data += bytes;
  }
  return buffers;
}

Buffers buffers_of(const Tensors& tensors, const Blocks& memory) {
  Buffers buffers;
  for (size_t i = 0; i < tensors.size(); ++i) buffers.push_back({memory[i], tensors[i].nbytes()});
  return buffers;
}

}  // namespace

TensorBackend::TensorBackend(const BackendOptions& options)
    : c10d::Backend(options.rank, options.size),
      names_(names_of(options)),
      timeout_(options.timeout) {}

Request TensorBackend::message_request(Operation operation, const at::Tensor& tensor,
                                       int peer) const {
  Request request{.operation = operation, .root = peer, .timeout = timeout()};
  (operation == Operation::send ? request.inputs : request.outputs) = {tensor};
  return request;
}

at::ScalarType TensorBackend::reduced_dtype(Operation operation, const at::Tensor& tensor,
                                            const c10d::ReduceOp& op) const {
  try {
    check_reduction(tensor.scalar_type(), op);
    return reduction_dtype(tensor.scalar_type(), op);
  } catch (const UsageError& error) {
    const CallSignature call{operation, op.op_, -1, 0, {signature_of(tensor)}, {}, {}, {}};
    throw UsageError(rank_list({getRank()}, names_->ranks) + ": " + describe(call, names_->ranks) +
                     ": " + error.what());
  }
}

void TensorBackend::add_all_reduces(TensorWork& work, const Tensors& data,
                                    const c10d::ReduceOp& op) {
  for (const auto& one : data) add_all_reduce(work, one, op);
}

template <class CallOptions>
TensorBackend::OwnWork TensorBackend::begin(Operation operation, const CallOptions& options,
                                            Request arguments) {
  arguments.operation = operation;
  if constexpr (requires { options.reduceOp; })
    arguments.reduction = static_cast<int>(options.reduceOp.op_);
  if constexpr (requires { options.rootRank; }) {
    check_rank(operation, "root", options.rootRank, getSize());
    arguments.root = static_cast<int>(options.rootRank);
  }
  if (operation != Operation::all_reduce_sparse) {
    for (const auto& tensor : arguments.inputs) check_dense(operation, tensor);
    for (const auto& tensor : arguments.outputs) check_dense(operation, tensor);
  }
  arguments.timeout = options.timeout.count() > 0 ? options.timeout : timeout();
  arguments.async = options.asyncOp;
  show(arguments);
  return make_work(std::move(arguments));
}

WorkPtr TensorBackend::issue(const OwnWork& work) {
  work->set_sequence(sequence_.fetch_add(1, std::memory_order_relaxed) + 1);
  submit(work);
  return work;
}

Blocks TensorBackend::parts_of(const at::Tensor& whole) const {
  Blocks blocks;
  blocks.reserve(static_cast<size_t>(getSize()));
  auto* start = static_cast<std::byte*>(whole.data_ptr());
  const size_t bytes = whole.nbytes() / static_cast<size_t>(getSize());
  for (int rank = 0; rank < getSize(); ++rank)
    blocks.push_back(start + static_cast<size_t>(rank) * bytes);
  return blocks;
}

WorkPtr TensorBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only(Operation::broadcast, tensors);
  const auto work = begin(Operation::broadcast, options, {.inputs = tensors});
  const int root = work->request().root;
  add_broadcast(*work, getRank() == root ? work->given(tensor) : work->taken(tensor, false), root);
  return issue(work);
}

WorkPtr TensorBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors[0].is_sparse()) return allreduce_sparse(tensors, options);
  const at::Tensor& tensor = only(Operation::all_reduce, tensors);
  const at::ScalarType dtype = reduced_dtype(Operation::all_reduce, tensor, options.reduceOp);
  const auto work = begin(Operation::all_reduce, options, {.inputs = tensors});
  add_all_reduce(*work, work->taken(tensor, true, dtype), options.reduceOp);
  return issue(work);
}

WorkPtr TensorBackend::allreduce_coalesced(Tensors& tensors,
                                           const c10d::AllreduceCoalescedOptions& options) {
  const auto work = begin(Operation::all_reduce_coalesced, options, {.inputs = tensors});
  Tensors data;
  for (const auto& tensor : tensors) {
    const at::ScalarType dtype =
        reduced_dtype(Operation::all_reduce_coalesced, tensor, options.reduceOp);
    data.push_back(work->taken(tensor, true, dtype));
  }
  add_all_reduces(*work, data, options.reduceOp);
  return issue(work);
}

// The ranks hold different numbers of elements: all gather how many, then indices and values padded
// to the most, and add them up in the order of the ranks.
WorkPtr TensorBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() != 1 || !tensors[0].is_sparse() || !tensors[0].is_cpu())
    throw UsageError("all_reduce of sparse tensors: expected one sparse tensor of the CPU");
  if (options.reduceOp.op_ != c10d::ReduceOp::SUM && options.reduceOp.op_ != c10d::ReduceOp::AVG)
    throw UsageError("all_reduce of sparse tensors: they are summed or averaged only");
  const auto work = begin(Operation::all_reduce_sparse, options, {.inputs = tensors});
  c10d::AllgatherOptions gather;
  gather.timeout = options.timeout;
  gather.asyncOp = false;
  const auto gather_all = [&](at::Tensor input) {
    std::vector<int64_t> shape = input.sizes().vec();
    shape.insert(shape.begin(), getSize());
    at::Tensor all = at::empty(shape, input.options());
    _allgather_base(all, input, gather)->wait();
    return all;
  };
  const at::Tensor mine = tensors[0].coalesce();
  const at::Tensor counts = gather_all(at::full({1}, mine._nnz(), at::kLong));
  const int64_t most = counts.max().item<int64_t>();
  const auto padded = [&](const at::Tensor& values, int64_t dim) {
    std::vector<int64_t> shape = values.sizes().vec();
    shape[static_cast<size_t>(dim)] = most;
    at::Tensor result = at::zeros(shape, values.options());
    result.narrow(dim, 0, mine._nnz()).copy_(values);
    return result;
  };
  const at::Tensor indices = gather_all(padded(mine.indices(), 1));
  const at::Tensor values = gather_all(padded(mine.values(), 0));
  at::Tensor sum;
  for (int rank = 0; rank < getSize(); ++rank) {
    const int64_t count = counts[rank].item<int64_t>();
    const at::Tensor one =
        at::sparse_coo_tensor(indices[rank].narrow(1, 0, count), values[rank].narrow(0, 0, count),
                              mine.sizes(), mine.options());
    sum = rank == 0 ? one : sum + one;
  }
  if (options.reduceOp.op_ == c10d::ReduceOp::AVG) sum = sum / getSize();
  write_to(tensors[0], sum.coalesce());
  work->complete(nullptr);
  return work;
}

WorkPtr TensorBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only(Operation::reduce, tensors);
  const at::ScalarType dtype = reduced_dtype(Operation::reduce, tensor, options.reduceOp);
  const auto work = begin(Operation::reduce, options, {.inputs = tensors});
  const int root = work->request().root;
  add_reduce(*work,
             getRank() == root ? work->taken(tensor, true, dtype) : work->given(tensor, dtype),
             options.reduceOp, root);
  return issue(work);
}

WorkPtr TensorBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                 const c10d::AllgatherOptions& options) {
  const at::Tensor& input = only(Operation::all_gather, inputs);
  const Tensors& list = only_list(Operation::all_gather, outputs, getSize());
  expect_alike(Operation::all_gather, input, list);
  const auto work = begin(Operation::all_gather, options, {.inputs = inputs, .outputs = list});
  add_all_gather(*work, work->given(input), work->taken(list));
  return issue(work);
}

// outputs[rank][i]: the i-th input of that rank.
WorkPtr TensorBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& options) {
  constexpr Operation operation = Operation::all_gather_coalesced;
  expect_count(operation, "lists", outputs.size(), static_cast<size_t>(getSize()));
  Request request{.inputs = inputs};
  for (const auto& list : outputs) {
    expect_count(operation, "outputs of a rank", list.size(), inputs.size());
    request.outputs.insert(request.outputs.end(), list.begin(), list.end());
  }
  const auto work = begin(operation, options, std::move(request));
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors list;
    for (const auto& of_rank : outputs) list.push_back(of_rank[i]);
    expect_alike(operation, inputs[i], list);
    add_all_gather(*work, work->given(inputs[i]), work->taken(list));
  }
  return issue(work);
}

WorkPtr TensorBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                       const c10d::AllgatherOptions& options) {
  return gather_each(
      begin(Operation::all_gather_into_tensor, options, {.inputs = {input}, .outputs = {output}}));
}

WorkPtr TensorBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::AllgatherOptions& options) {
  return gather_each(begin(Operation::all_gather_into_tensor_coalesced, options,
                           {.inputs = inputs, .outputs = outputs}));
}

WorkPtr TensorBackend::gather_each(const OwnWork& work) {
  const Request& call = work->request();
  expect_count(call.operation, "outputs", call.outputs.size(), call.inputs.size());
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    expect_multiple(call.operation, call.outputs[i], call.inputs[i], getSize());
    add_all_gather(*work, work->given(call.inputs[i]),
                   parts_of(work->taken(call.outputs[i], false)));
  }
  return issue(work);
}

WorkPtr TensorBackend::gather(TensorLists& outputs, Tensors& inputs,
                              const c10d::GatherOptions& options) {
  const at::Tensor& input = only(Operation::gather, inputs);
  const Tensors list =
      list_of_root(Operation::gather, outputs, getSize(), getRank() == options.rootRank);
  expect_alike(Operation::gather, input, list);
  const auto work = begin(Operation::gather, options, {.inputs = inputs, .outputs = list});
  add_gather(*work, work->given(input), work->taken(list), work->request().root);
  return issue(work);
}

WorkPtr TensorBackend::scatter(Tensors& outputs, TensorLists& inputs,
                               const c10d::ScatterOptions& options) {
  const at::Tensor& output = only(Operation::scatter, outputs);
  const Tensors list =
      list_of_root(Operation::scatter, inputs, getSize(), getRank() == options.rootRank);
  expect_alike(Operation::scatter, output, list);
  const auto work = begin(Operation::scatter, options, {.inputs = list, .outputs = outputs});
  add_scatter(*work, work->given(list), work->taken(output, false), work->request().root);
  return issue(work);
}

WorkPtr TensorBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                      const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only(Operation::reduce_scatter, outputs);
  const Tensors& list = only_list(Operation::reduce_scatter, inputs, getSize());
  expect_alike(Operation::reduce_scatter, output, list);
  const at::ScalarType dtype = reduced_dtype(Operation::reduce_scatter, output, options.reduceOp);
  const auto work = begin(Operation::reduce_scatter, options, {.inputs = list, .outputs = outputs});
  add_reduce_scatter(*work, work->given(list, dtype), work->taken(output, false, dtype),
                     options.reduceOp);
  return issue(work);
}

WorkPtr TensorBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                            const c10d::ReduceScatterOptions& options) {
  return scatter_each(
      begin(Operation::reduce_scatter_tensor, options, {.inputs = {input}, .outputs = {output}}),
      options.reduceOp);
}

WorkPtr TensorBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::ReduceScatterOptions& options) {
  return scatter_each(begin(Operation::reduce_scatter_tensor_coalesced, options,
                            {.inputs = inputs, .outputs = outputs}),
                      options.reduceOp);
}

WorkPtr TensorBackend::scatter_each(const OwnWork& work, const c10d::ReduceOp& op) {
  const Request& call = work->request();
  expect_count(call.operation, "outputs", call.outputs.size(), call.inputs.size());
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    expect_multiple(call.operation, call.inputs[i], call.outputs[i], getSize());
    const at::ScalarType dtype = reduced_dtype(call.operation, call.outputs[i], op);
    add_reduce_scatter(*work, parts_of(work->given(call.inputs[i], dtype)),
                       work->taken(call.outputs[i], false, dtype), op);
  }
  return issue(work);
}

WorkPtr TensorBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                     std::vector<int64_t>& output_splits,
                                     std::vector<int64_t>& input_splits,
                                     const c10d::AllToAllOptions& options) {
  constexpr Operation operation = Operation::all_to_all_single;
  expect_one_dtype(operation, input, output);
  const auto sent = rows_of_ranks(operation, "input_splits", input, input_splits, getSize());
  const auto received = rows_of_ranks(operation, "output_splits", output, output_splits, getSize());
  const auto work = begin(operation, options,
                          {.inputs = {input},
                           .outputs = {output},
                           .input_splits = input_splits,
                           .output_splits = output_splits});
  add_all_to_all(*work, input.scalar_type(), cut(work->given(input), sent),
                 cut(work->taken(output, false), received));
  return issue(work);
}

WorkPtr TensorBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                const c10d::AllToAllOptions& options) {
  constexpr Operation operation = Operation::all_to_all;
  expect_count(operation, "inputs", inputs.size(), static_cast<size_t>(getSize()));
  expect_count(operation, "outputs", outputs.size(), static_cast<size_t>(getSize()));
  expect_one_dtype(operation, inputs, outputs);
  const auto work = begin(operation, options, {.inputs = inputs, .outputs = outputs});
  add_all_to_all(*work, inputs[0].scalar_type(), buffers_of(inputs, work->given(inputs)),
                 buffers_of(outputs, work->taken(outputs)));
  return issue(work);
}

WorkPtr TensorBackend::barrier(const c10d::BarrierOptions& options) {
  const auto work = begin(Operation::barrier, options, {});
  add_barrier(*work);
  return issue(work);
}

// Every wait names who is missing, so there is nothing more to monitor.
void TensorBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) {
  meet(options, {.operation = Operation::monitored_barrier});
}

void TensorBackend::agree(Operation operation, const at::Tensor& tensor) {
  meet({}, {.operation = operation, .inputs = {tensor}});
}

void TensorBackend::meet(c10d::BarrierOptions options, Request call) {
  options.asyncOp = false;
  const Operation operation = call.operation;
  const auto work = begin(operation, options, std::move(call));
  add_barrier(*work);
  issue(work)->wait();
}

WorkPtr TensorBackend::send(Tensors& tensors, int dst, int tag) {
  check_rank(Operation::send, "dst", dst, getSize());
  return message(Operation::send, only(Operation::send, tensors), dst, tag);
}

WorkPtr TensorBackend::recv(Tensors& tensors, int src, int tag) {
  check_rank(Operation::recv, "src", src, getSize());
  return message(Operation::recv, only(Operation::recv, tensors), src, tag);
}

WorkPtr TensorBackend::recvAnysource(Tensors& tensors, int tag) {
  return message(Operation::recv_any, only(Operation::recv_any, tensors), kAnyRank, tag);
}

}  // namespace lockstep::backends
