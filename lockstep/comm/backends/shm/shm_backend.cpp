#include "lockstep/comm/backends/shm/shm_backend.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/backends/shm/shm.h"
#include "lockstep/comm/backends/shm/shm_message_work.h"
#include "lockstep/comm/backends/shm/tensor_reduction.h"
#include "lockstep/comm/backends/sparse_all_reduce.h"
#include "lockstep/comm/backends/tensor_checks.h"
#include "lockstep/comm/shared_memory/processors.h"

namespace lockstep::shm {

using namespace backends;

namespace {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr());
}

int code_of(const c10d::ReduceOp& op) {
  return static_cast<int>(op.op_);
}

SharedGroupOptions group_options(const BackendOptions& options) {
  SharedGroupOptions group;
  group.segment.rank = options.rank;
  group.segment.size = options.size;
  group.segment.timeout = options.timeout;
  group.segment.group = options.group_name;
  group.names = options.global_ranks;
  group.judge = [names = options.global_ranks,
                 name = options.group_name](const std::vector<std::string>& encoded) {
    std::vector<CallSignature> calls;
    for (const auto& call : encoded) calls.push_back(decode(call));
    return find_mismatch(calls, names, name)
        .value_or("the ranks of group '" + name +
                  "' did not all_reduce the same part of the same symmetric memory\n  hint: what "
                  "ProcessGroup::symmetric_empty gave must be used alike on all ranks");
  };
  return group;
}

Meeting meeting_over(const c10::intrusive_ptr<c10d::Store>& store, const std::string& key) {
  return {[store, key](const std::string& name) { store->set(key, name); },
          [store, key] { return store->get_to_str(key); }};
}

ShmQueue::Options queue_options(int size) {
  ShmQueue::Options options;
  if (has_spare_processors(size)) options.inline_bytes = 256 << 10;
  return options;
}

MessagesOptions message_options(const std::shared_ptr<const GroupNames>& names) {
  MessagesOptions options;
  options.judge = [names](const Disagreement& met) { return judge_messages(met, *names); };
  return options;
}

std::shared_ptr<const GroupNames> names_of(const BackendOptions& options) {
  auto names = std::make_shared<GroupNames>();
  names->ranks = options.global_ranks;
  for (int rank = static_cast<int>(names->ranks.size()); rank < options.size; ++rank)
    names->ranks.push_back(rank);
  names->group = options.group_name;
  return names;
}

}  // namespace

ShmBackend::ShmBackend(const BackendOptions& options)
    : c10d::Backend(options.rank, options.size),
      names_(names_of(options)),
      timeout_(options.timeout),
      store_(options.store),
      group_(group_options(options), meeting_over(options.store, "shm/meeting")),
      queue_(group_, queue_options(options.size)),
      messages_(group_, message_options(names_)) {}

ShmBackend::~ShmBackend() {
  close();
}

ShmBackend::OwnWork ShmBackend::make_work(Request request, std::chrono::milliseconds timeout) {
  auto work = c10::make_intrusive<ShmWork>(getRank(), std::move(request), names_,
                                           timeout.count() > 0 ? timeout : timeout_.load());
  return work;
}

ShmBackend::WorkPtr ShmBackend::submit(const OwnWork& work, std::unique_ptr<Plan> plan,
                                       bool async) {
  work->set_sequence(sequence_.fetch_add(1, std::memory_order_relaxed) + 1);
  work->set_plan(std::move(plan));
  queue_.submit(work, !async);
  return work;
}

ShmBackend::WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  only("broadcast", tensors);
  check_root("broadcast", options.rootRank, getSize());
  const int root = static_cast<int>(options.rootRank);
  auto work = make_work({.operation = Operation::broadcast, .root = root, .inputs = tensors},
                        options.timeout);
  const at::Tensor data =
      getRank() == root ? work->given(tensors[0]) : work->taken(tensors[0], false);
  work->bytes = data.nbytes();
  return submit(work, broadcast_plan(group_, bytes_of(data), data.nbytes(), root), options.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors[0].is_sparse()) return allreduce_sparse(tensors, options);
  const at::Tensor& tensor = only("all_reduce", tensors);
  const ReduceKernel kernel = kernel_for(tensor.scalar_type(), options.reduceOp);
  auto work = make_work({.operation = Operation::all_reduce,
                         .reduction = code_of(options.reduceOp),
                         .inputs = tensors},
                        options.timeout);
  const at::Tensor data = work->taken(tensor, true);
  work->bytes = data.nbytes();
  const auto count = static_cast<size_t>(data.numel());
  const DataType type = data_type(data.scalar_type());
  if (pays_in_place(group_, data.nbytes())) {
    if (auto place = regions_.find(bytes_of(data), data.nbytes())) {
      auto plan = all_reduce_plan(group_, *place->region, place->offset, count, type, kernel);
      work->set_place(std::move(*place));
      return submit(work, std::move(plan), options.asyncOp);
    }
  }
  return submit(work, all_reduce_plan(group_, bytes_of(data), count, type, kernel),
                options.asyncOp);
}

at::Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  if (size < 0 || !options.device().is_cpu())
    throw UsageError("symmetric memory: " + std::to_string(size) + " elements on " +
                     options.device().str() + "; expected 0 or more on the CPU");
  const size_t bytes = static_cast<size_t>(size) * options.dtype().itemsize();
  const size_t number = ++regions_made_;
  const std::string what = "symmetric_empty of " + std::to_string(bytes) + " bytes, number " +
                           std::to_string(number) + " of group '" + names_->group + "',";
  const std::string key = "shm/region/" + std::to_string(number);
  Meeting meeting = meeting_over(store_, key);
  meeting.ask = [this, key] {
    return store_->check({key}) ? store_->get_to_str(key) : std::string();
  };
  RegionOptions wish{getRank(), getSize(), bytes, timeout_.load(), names_->group};
  wish.look = [&](const std::vector<int>& ranks) { group_.look_after(ranks, what); };
  const auto region = std::make_shared<const Region>(wish, meeting);
  regions_.add(number, region);
  return at::from_blob(
      region->mine(), {size}, [region](void*) {}, options);
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  auto work = make_work({.operation = Operation::all_reduce_coalesced,
                         .reduction = code_of(options.reduceOp),
                         .inputs = tensors},
                        options.timeout);
  std::vector<std::unique_ptr<Plan>> plans;
  for (const auto& tensor : tensors) {
    check_dense("all_reduce_coalesced", tensor);
    const ReduceKernel kernel = kernel_for(tensor.scalar_type(), options.reduceOp);
    const at::Tensor data = work->taken(tensor, true);
    work->bytes += data.nbytes();
    plans.push_back(all_reduce_plan(group_, bytes_of(data), static_cast<size_t>(data.numel()),
                                    data_type(data.scalar_type()), kernel));
  }
  return submit(work, sequence_plan(std::move(plans)), options.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only("reduce", tensors);
  check_root("reduce", options.rootRank, getSize());
  const int root = static_cast<int>(options.rootRank);
  const ReduceKernel kernel = kernel_for(tensor.scalar_type(), options.reduceOp);
  auto work = make_work({.operation = Operation::reduce,
                         .reduction = code_of(options.reduceOp),
                         .root = root,
                         .inputs = tensors},
                        options.timeout);
  const at::Tensor data = getRank() == root ? work->taken(tensor, true) : work->given(tensor);
  work->bytes = data.nbytes();
  return submit(work,
                reduce_plan(group_, bytes_of(data), static_cast<size_t>(data.numel()),
                            data_type(data.scalar_type()), kernel, root),
                options.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  const at::Tensor& input = only("all_gather", inputs);
  const Tensors& list = only_list("all_gather", outputs, getSize());
  expect_alike("all_gather", input, list);
  auto work = make_work({.operation = Operation::all_gather, .inputs = inputs, .outputs = list},
                        options.timeout);
  std::vector<std::byte*> targets;
  for (const auto& output : list) targets.push_back(bytes_of(work->taken(output, false)));
  const at::Tensor data = work->given(input);
  work->bytes = data.nbytes() * list.size();
  return submit(work, all_gather_plan(group_, bytes_of(data), data.nbytes(), std::move(targets)),
                options.asyncOp);
}

std::unique_ptr<Plan> ShmBackend::gather_into(ShmWork& work, const at::Tensor& output,
                                              const at::Tensor& input) {
  const at::Tensor data = work.given(input);
  std::byte* start = bytes_of(work.taken(output, false));
  std::vector<std::byte*> targets;
  for (int rank = 0; rank < getSize(); ++rank)
    targets.push_back(start + static_cast<size_t>(rank) * data.nbytes());
  work.bytes += output.nbytes();
  return all_gather_plan(group_, bytes_of(data), data.nbytes(), std::move(targets));
}

ShmBackend::WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  expect_multiple("all_gather_into_tensor", output, input, getSize());
  auto work = make_work(
      {.operation = Operation::all_gather_into_tensor, .inputs = {input}, .outputs = {output}},
      options.timeout);
  auto plan = gather_into(*work, output, input);
  return submit(work, std::move(plan), options.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const char* name = "all_gather_into_tensor_coalesced";
  if (outputs.size() != inputs.size())
    throw UsageError(std::string(name) + ": as many outputs as inputs are needed");
  auto work = make_work({.operation = Operation::all_gather_into_tensor_coalesced,
                         .inputs = inputs,
                         .outputs = outputs},
                        options.timeout);
  std::vector<std::unique_ptr<Plan>> plans;
  for (size_t i = 0; i < inputs.size(); ++i) {
    expect_multiple(name, outputs[i], inputs[i], getSize());
    plans.push_back(gather_into(*work, outputs[i], inputs[i]));
  }
  return submit(work, sequence_plan(std::move(plans)), options.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  // outputs[rank][i]: the i-th input of that rank.
  const char* name = "all_gather_coalesced";
  if (outputs.size() != static_cast<size_t>(getSize()))
    throw UsageError(std::string(name) + ": expected one list a rank");
  Request request{.operation = Operation::all_gather_coalesced, .inputs = inputs};
  for (const auto& list : outputs) {
    if (list.size() != inputs.size())
      throw UsageError(std::string(name) + ": expected as many outputs a rank as inputs");
    request.outputs.insert(request.outputs.end(), list.begin(), list.end());
  }
  auto work = make_work(std::move(request), options.timeout);
  std::vector<std::unique_ptr<Plan>> plans;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_dense(name, inputs[i]);
    const at::Tensor data = work->given(inputs[i]);
    std::vector<std::byte*> targets;
    for (const auto& list : outputs) {
      check_dense(name, list[i]);
      expect_alike(name, inputs[i], {list[i]});
      targets.push_back(bytes_of(work->taken(list[i], false)));
    }
    work->bytes += data.nbytes() * targets.size();
    plans.push_back(all_gather_plan(group_, bytes_of(data), data.nbytes(), std::move(targets)));
  }
  return submit(work, sequence_plan(std::move(plans)), options.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::gather(TensorLists& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  const at::Tensor& input = only("gather", inputs);
  check_root("gather", options.rootRank, getSize());
  const int root = static_cast<int>(options.rootRank);
  Request request{.operation = Operation::gather, .root = root, .inputs = inputs};
  if (getRank() == root) {
    request.outputs = only_list("gather", outputs, getSize());
    expect_alike("gather", input, request.outputs);
  }
  auto work = make_work(std::move(request), options.timeout);
  std::vector<std::byte*> targets;
  for (const auto& output : work->request().outputs)
    targets.push_back(bytes_of(work->taken(output, false)));
  const at::Tensor data = work->given(input);
  work->bytes = data.nbytes() * static_cast<size_t>(getSize());
  return submit(work, all_gather_plan(group_, bytes_of(data), data.nbytes(), std::move(targets)),
                options.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                        const c10d::ScatterOptions& options) {
  const at::Tensor& output = only("scatter", outputs);
  check_root("scatter", options.rootRank, getSize());
  const int root = static_cast<int>(options.rootRank);
  Request request{.operation = Operation::scatter, .root = root, .outputs = outputs};
  if (getRank() == root) {
    request.inputs = only_list("scatter", inputs, getSize());
    expect_alike("scatter", output, request.inputs);
  }
  auto work = make_work(std::move(request), options.timeout);
  std::vector<const std::byte*> sources;
  for (const auto& input : work->request().inputs) sources.push_back(bytes_of(work->given(input)));
  const at::Tensor data = work->taken(output, false);
  work->bytes = data.nbytes() * static_cast<size_t>(getSize());
  return submit(work, scatter_plan(group_, std::move(sources), bytes_of(data), data.nbytes(), root),
                options.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only("reduce_scatter", outputs);
  const Tensors& list = only_list("reduce_scatter", inputs, getSize());
  expect_alike("reduce_scatter", output, list);
  const ReduceKernel kernel = kernel_for(output.scalar_type(), options.reduceOp);
  auto work = make_work({.operation = Operation::reduce_scatter,
                         .reduction = code_of(options.reduceOp),
                         .inputs = list,
                         .outputs = outputs},
                        options.timeout);
  std::vector<const std::byte*> sources;
  for (const auto& input : list) sources.push_back(bytes_of(work->given(input)));
  const at::Tensor data = work->taken(output, false);
  work->bytes = data.nbytes() * list.size();
  return submit(
      work,
      reduce_scatter_plan(group_, std::move(sources), bytes_of(data),
                          static_cast<size_t>(data.numel()), data_type(data.scalar_type()), kernel),
      options.asyncOp);
}

std::unique_ptr<Plan> ShmBackend::scatter_from(ShmWork& work, const at::Tensor& output,
                                               const at::Tensor& input,
                                               const c10d::ReduceOp& reduction) {
  const ReduceKernel kernel = kernel_for(output.scalar_type(), reduction);
  const at::Tensor data = work.taken(output, false);
  const std::byte* start = bytes_of(work.given(input));
  std::vector<const std::byte*> sources;
  for (int rank = 0; rank < getSize(); ++rank)
    sources.push_back(start + static_cast<size_t>(rank) * data.nbytes());
  work.bytes += input.nbytes();
  return reduce_scatter_plan(group_, std::move(sources), bytes_of(data),
                             static_cast<size_t>(data.numel()), data_type(data.scalar_type()),
                             kernel);
}

ShmBackend::WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  expect_multiple("reduce_scatter_tensor", input, output, getSize());
  auto work = make_work({.operation = Operation::reduce_scatter_tensor,
                         .reduction = code_of(options.reduceOp),
                         .inputs = {input},
                         .outputs = {output}},
                        options.timeout);
  auto plan = scatter_from(*work, output, input, options.reduceOp);
  return submit(work, std::move(plan), options.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  const char* name = "reduce_scatter_tensor_coalesced";
  if (outputs.size() != inputs.size())
    throw UsageError(std::string(name) + ": as many outputs as inputs are needed");
  auto work = make_work({.operation = Operation::reduce_scatter_tensor_coalesced,
                         .reduction = code_of(options.reduceOp),
                         .inputs = inputs,
                         .outputs = outputs},
                        options.timeout);
  std::vector<std::unique_ptr<Plan>> plans;
  for (size_t i = 0; i < inputs.size(); ++i) {
    expect_multiple(name, inputs[i], outputs[i], getSize());
    plans.push_back(scatter_from(*work, outputs[i], inputs[i], options.reduceOp));
  }
  return submit(work, sequence_plan(std::move(plans)), options.asyncOp);
}

namespace {

/// How many bytes of `tensor` go to or come from each rank: rows by `splits`, even parts without.
std::vector<uint64_t> split_bytes(const at::Tensor& tensor, const std::vector<int64_t>& splits,
                                  int size) {
  const auto n = static_cast<size_t>(size);
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const bool even = splits.empty();
  int64_t sum = 0;
  for (const int64_t split : splits) sum += split;
  const bool negative = std::any_of(splits.begin(), splits.end(), [](int64_t s) { return s < 0; });
  if (even ? rows % size != 0 : splits.size() != n || sum != rows || negative)
    throw UsageError("all_to_all_single: the splits do not cut " + std::to_string(rows) +
                     " rows into " + std::to_string(size) + " parts");
  const uint64_t row = rows == 0 ? 0 : tensor.nbytes() / static_cast<uint64_t>(rows);
  std::vector<uint64_t> bytes;
  for (size_t rank = 0; rank < n; ++rank)
    bytes.push_back(row * static_cast<uint64_t>(even ? rows / size : splits[rank]));
  return bytes;
}

}  // namespace

ShmBackend::WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_splits,
                                              std::vector<int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  check_dense("all_to_all_single", output);
  check_dense("all_to_all_single", input);
  if (output.scalar_type() != input.scalar_type())
    throw UsageError("all_to_all_single: the output is " + describe(signature_of(output)) +
                     ", the input " + describe(signature_of(input)));
  auto send_bytes = split_bytes(input, input_splits, getSize());
  auto receive_bytes = split_bytes(output, output_splits, getSize());
  auto work = make_work({.operation = Operation::all_to_all_single,
                         .inputs = {input},
                         .outputs = {output},
                         .input_splits = input_splits,
                         .output_splits = output_splits},
                        options.timeout);
  const std::byte* from = bytes_of(work->given(input));
  std::byte* to = bytes_of(work->taken(output, false));
  std::vector<const std::byte*> sends;
  std::vector<std::byte*> receives;
  for (int rank = 0; rank < getSize(); ++rank) {
    sends.push_back(from);
    receives.push_back(to);
    from += send_bytes[static_cast<size_t>(rank)];
    to += receive_bytes[static_cast<size_t>(rank)];
  }
  work->bytes = input.nbytes();
  const auto timeout = work->timeout();
  auto plan = all_to_all_plan(group_, *work, std::move(sends), std::move(send_bytes),
                              std::move(receives), std::move(receive_bytes), timeout);
  return submit(work, std::move(plan), options.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& options) {
  only_list("all_to_all", {outputs}, getSize());
  only_list("all_to_all", {inputs}, getSize());
  auto work = make_work({.operation = Operation::all_to_all, .inputs = inputs, .outputs = outputs},
                        options.timeout);
  std::vector<const std::byte*> sends;
  std::vector<std::byte*> receives;
  std::vector<uint64_t> send_bytes, receive_bytes;
  for (const auto& input : inputs) {
    const at::Tensor data = work->given(input);
    sends.push_back(bytes_of(data));
    send_bytes.push_back(data.nbytes());
    work->bytes += data.nbytes();
  }
  for (const auto& output : outputs) {
    const at::Tensor data = work->taken(output, false);
    receives.push_back(bytes_of(data));
    receive_bytes.push_back(data.nbytes());
  }
  const auto timeout = work->timeout();
  auto plan = all_to_all_plan(group_, *work, std::move(sends), std::move(send_bytes),
                              std::move(receives), std::move(receive_bytes), timeout);
  return submit(work, std::move(plan), options.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  auto work = make_work({.operation = Operation::barrier}, options.timeout);
  return submit(work, barrier_plan(), options.asyncOp);
}

void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) {
  // Every wait names who is missing, so there is nothing more to monitor.
  auto work = make_work({.operation = Operation::monitored_barrier}, options.timeout);
  submit(work, barrier_plan(), false)->wait();
}

ShmBackend::WorkPtr ShmBackend::allreduce_sparse(Tensors& tensors,
                                                 const c10d::AllreduceOptions& options) {
  c10d::AllgatherOptions gather;
  gather.timeout = options.timeout;
  gather.asyncOp = false;
  all_reduce_sparse(tensors, options.reduceOp, getSize(), [&](at::Tensor& all, at::Tensor& mine) {
    _allgather_base(all, mine, gather)->wait();
  });
  auto work = make_work({.operation = Operation::all_reduce_sparse,
                         .reduction = code_of(options.reduceOp),
                         .inputs = tensors},
                        options.timeout);
  work->complete(nullptr);
  return work;
}

ShmBackend::WorkPtr ShmBackend::message(Operation operation, c10d::OpType type, Tensors& tensors,
                                        int peer, int tag) {
  const std::string name(operation_name(operation));
  const at::Tensor& tensor = only(name.c_str(), tensors);
  auto work = c10::make_intrusive<ShmMessageWork>(getRank(), type, tensor);
  MessageCall call;
  call.tag = tag;
  call.data = work->memory().data_ptr();
  call.bytes = work->memory().nbytes();
  call.call = std::make_shared<MessageText>(operation, tensor, peer, tag, names_, work->memory());
  call.timeout = timeout_;
  work->begin(operation == Operation::send ? messages_.post_send(peer, std::move(call))
                                           : messages_.post_recv(peer, std::move(call)));
  return work;
}

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int dst, int tag) {
  return message(Operation::send, c10d::OpType::SEND, tensors, dst, tag);
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int src, int tag) {
  return message(Operation::recv, c10d::OpType::RECV, tensors, src, tag);
}

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return message(Operation::recv_any, c10d::OpType::RECVANYSOURCE, tensors, Messages::kAnyRank,
                 tag);
}

void ShmBackend::abort() {
  group_.give_up(Verdict::lost, group_.name(getRank()) + " has given the group up" +
                                    group_.noted_cause(getRank()));
  close();
}

void ShmBackend::shutdown() {
  close();
}

void ShmBackend::close() {
  queue_.close();
  messages_.close();
  group_.leave();
}

BackendInfo info() {
  BackendInfo info{"shm", true, {}, {}};
  info.reason = missing_support();
  info.available = info.reason.empty();
  if (!info.available) info.remedy = "use --backend gloo";
  return info;
}

c10::intrusive_ptr<c10d::Backend> make(const BackendOptions& options) {
  return c10::make_intrusive<ShmBackend>(options);
}

}  // namespace lockstep::shm
