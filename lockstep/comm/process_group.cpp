#include "lockstep/comm/process_group.h"

#include <ATen/ATen.h>

#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lockstep/base/duration.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/backends/tensor_backend.h"
#include "lockstep/comm/backends/tensor_checks.h"
#include "lockstep/comm/checks/call_signature.h"
#include "lockstep/comm/checks/checked_backend.h"
#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/comm/group_impl.h"

namespace lockstep {
namespace {

using Tensors = std::vector<at::Tensor>;

/// c10d numbers them in the same order.
c10d::ReduceOp native_op(ReduceOp op) {
  static_assert(static_cast<int>(ReduceOp::avg) == c10d::ReduceOp::AVG &&
                static_cast<int>(ReduceOp::max) == c10d::ReduceOp::MAX &&
                static_cast<int>(ReduceOp::bxor) == c10d::ReduceOp::BXOR);
  if (op < ReduceOp::sum || op > ReduceOp::bxor) throw UsageError("an unknown reduction");
  return static_cast<c10d::ReduceOp::RedOpType>(op);
}

ProcessGroup::Impl& checked(const std::shared_ptr<ProcessGroup::Impl>& impl) {
  if (!impl) throw UsageError("a null process group: this rank is not of that group");
  return *impl;
}

using backends::check_rank;
using backends::check_tensor;
using backends::expect_count;
using backends::expect_multiple;
using backends::expect_one_dtype;
using backends::rows_of_ranks;
using Impl = ProcessGroup::Impl;

template <class CallOptions>
CallOptions options_of(const Impl& impl, bool blocking) {
  CallOptions options;
  options.timeout = impl.timeout;
  options.asyncOp = !blocking || !impl.traits().runs_in_caller;
  return options;
}

template <class CallOptions>
CallOptions options_of(const Impl& impl, bool blocking, ReduceOp op) {
  auto options = options_of<CallOptions>(impl, blocking);
  options.reduceOp = native_op(op);
  return options;
}

void check_count(const Impl& impl, Operation operation, const char* argument, size_t count,
                 bool one_a_rank = true) {
  expect_count(operation, argument, count, one_a_rank ? static_cast<size_t>(impl.size) : 0);
}

/// Of one dtype.
void check_tensors(const Impl& impl, Operation operation, at::TensorList some,
                   at::TensorList others = {}) {
  for (const at::TensorList list : {some, others})
    for (const auto& tensor : list) check_tensor(operation, tensor, impl.traits().takes_strided);
  expect_one_dtype(operation, some, others);
}

/// LibTorch's Gloo copies tensors of a device for collectives, but not for messages.
void check_message(const Impl& impl, Operation operation, const at::Tensor& tensor) {
  check_tensors(impl, operation, tensor);
  if (!impl.traits().takes_cuda || tensor.is_cpu()) return;
  throw UsageError(std::string(operation_name(operation)) + ": a tensor on " +
                       tensor.device().str() + "; messages over gloo are of CPU tensors",
                   "send tensor.cpu(), or use a group over nccl");
}

void check_received(const Impl& impl, Operation operation, const at::Tensor& tensor) {
  check_message(impl, operation, tensor);
  if (tensor.layout() == at::kStrided) backends::expect_own_elements(operation, tensor);
}

/// The handle of what `call` begins. `p2p`: as Impl::make_work, also of a reduce_scatter, whose end
/// Gloo tells only to who waits, too.
template <class Call>
Work started(const Impl& impl, Tensors outputs, Tensors kept_alive, Call call, bool p2p = false) {
  return impl.make_work(translated(call), std::move(outputs), std::move(kept_alive), p2p);
}

/// The same memory without a gradient: LibTorch's Gloo copies into results, on a thread of its own.
/// A sparse tensor has other memory afterwards, so it is left as it is.
at::Tensor without_grad(const at::Tensor& tensor) {
  return tensor.requires_grad() && tensor.layout() == at::kStrided ? tensor.detach() : tensor;
}
Tensors without_grad(Tensors tensors) {
  for (auto& tensor : tensors) tensor = without_grad(tensor);
  return tensors;
}

}  // namespace

int ProcessGroup::rank() const {
  return checked(impl_).rank;
}
int ProcessGroup::size() const {
  return checked(impl_).size;
}
const std::string& ProcessGroup::backend() const {
  return checked(impl_).backend_name;
}
const std::vector<int>& ProcessGroup::global_ranks() const {
  return checked(impl_).global_ranks;
}
std::chrono::milliseconds ProcessGroup::timeout() const {
  return checked(impl_).timeout;
}

void ProcessGroup::set_timeout(std::chrono::milliseconds timeout) {
  auto& impl = checked(impl_);
  check_timeout("set_timeout", timeout);
  impl.backend().setTimeout(timeout);
  impl.timeout = timeout;
}

c10d::ProcessGroup& ProcessGroup::native() const {
  return checked(impl_).native();
}

at::Tensor ProcessGroup::symmetric_empty(int64_t numel, at::ScalarType dtype) const {
  auto& impl = checked(impl_);
  if (numel < 0)
    throw UsageError("symmetric_empty: " + std::to_string(numel) + " elements, expected 0 or more");
  const auto options = at::TensorOptions().dtype(dtype).device(impl.device());
  auto& backend = impl.backend();
  if (!options.device().is_cpu() || !backend.supportsTensorAlloc(0))
    return at::empty({numel}, options);
  return translated([&] { return backend.allocateTensor(static_cast<long>(numel), options); });
}

Work ProcessGroup::isend(const at::Tensor& tensor, int dst, int tag) const {
  auto& impl = checked(impl_);
  check_rank(Operation::send, "dst", dst, impl.size);
  check_message(impl, Operation::send, tensor);
  Tensors tensors{tensor};
  return started(
      impl, {}, tensors, [&] { return impl.backend().send(tensors, dst, tag); }, /*p2p=*/true);
}

Work ProcessGroup::irecv(at::Tensor& tensor, int src, int tag) const {
  auto& impl = checked(impl_);
  check_rank(Operation::recv, "src", src, impl.size);
  check_received(impl, Operation::recv, tensor);
  Tensors tensors{without_grad(tensor)};
  return started(
      impl, {tensor}, {}, [&] { return impl.backend().recv(tensors, src, tag); }, /*p2p=*/true);
}

int ProcessGroup::recv_any(at::Tensor& tensor, int tag) const {
  auto& impl = checked(impl_);
  check_received(impl, Operation::recv_any, tensor);
  Tensors tensors{without_grad(tensor)};
  const auto work = translated([&] { return impl.backend().recvAnysource(tensors, tag); });
  impl.make_work(work, {}, {}, /*p2p=*/true).wait();
  return translated([&] { return work->sourceRank(); });
}

namespace {

/// Whether a receive of the batch writes where `sent` lies.
bool is_received_into(const std::vector<P2POp>& ops, const at::Tensor& sent) {
  return std::any_of(ops.begin(), ops.end(), [&](const P2POp& op) {
    return op.kind == P2POp::Kind::recv && op.tensor.has_storage() && sent.has_storage() &&
           op.tensor.is_alias_of(sent);
  });
}

}  // namespace

std::vector<Work> ProcessGroup::batch_isend_irecv(const std::vector<P2POp>& ops) const {
  auto& impl = checked(impl_);
  const bool grouped = impl.backend().supportsCoalescing();
  if (grouped) translated([&] { impl.backend().startCoalescing(); });
  std::vector<Work> works;
  Tensors all;  // Copied before anything is received.
  for (const auto& op : ops) {
    const bool copies = op.kind == P2POp::Kind::send && is_received_into(ops, op.tensor);
    all.push_back(copies ? op.tensor.clone() : op.tensor);
  }
  for (size_t i = 0; i < ops.size(); ++i)
    works.push_back(ops[i].kind == P2POp::Kind::send ? isend(all[i], ops[i].peer, ops[i].tag)
                                                     : irecv(all[i], ops[i].peer, ops[i].tag));
  if (!grouped) return works;
  auto work = translated([&] { return impl.backend().endCoalescing(); });
  return {impl.make_work(std::move(work), all, {})};
}

Work ProcessGroup::all_reduce_async(at::Tensor& tensor, ReduceOp op) const {
  const auto& impl = checked(impl_);
  check_tensors(impl, Operation::all_reduce, tensor);
  const auto options = options_of<c10d::AllreduceOptions>(impl, blocking_, op);
  Tensors tensors{without_grad(tensor)};
  return started(impl, {tensor}, {}, [&] { return impl.backend().allreduce(tensors, options); });
}

Work ProcessGroup::all_reduce_coalesced_async(Tensors& tensors, ReduceOp op) const {
  const auto& impl = checked(impl_);
  if (tensors.empty()) throw UsageError("all_reduce_coalesced: no tensors");
  check_tensors(impl, Operation::all_reduce_coalesced, tensors);
  const auto options = options_of<c10d::AllreduceCoalescedOptions>(impl, blocking_, op);
  Tensors results = without_grad(tensors);
  return started(impl, tensors, {},
                 [&] { return impl.backend().allreduce_coalesced(results, options); });
}

Work ProcessGroup::reduce_async(at::Tensor& tensor, int dst, ReduceOp op) const {
  const auto& impl = checked(impl_);
  check_rank(Operation::reduce, "dst", dst, impl.size);
  check_tensors(impl, Operation::reduce, tensor);
  auto options = options_of<c10d::ReduceOptions>(impl, blocking_, op);
  options.rootRank = dst;
  Tensors tensors{without_grad(tensor)};
  return started(impl, {tensor}, {}, [&] { return impl.backend().reduce(tensors, options); });
}

Work ProcessGroup::broadcast_async(at::Tensor& tensor, int src) const {
  const auto& impl = checked(impl_);
  check_rank(Operation::broadcast, "src", src, impl.size);
  check_tensors(impl, Operation::broadcast, tensor);
  auto options = options_of<c10d::BroadcastOptions>(impl, blocking_);
  options.rootRank = src;
  Tensors tensors{without_grad(tensor)};
  return started(impl, {tensor}, {}, [&] { return impl.backend().broadcast(tensors, options); });
}

Work ProcessGroup::all_gather_async(Tensors& outputs, const at::Tensor& input) const {
  const auto& impl = checked(impl_);
  check_count(impl, Operation::all_gather, "outputs", outputs.size());
  check_tensors(impl, Operation::all_gather, input, outputs);
  const auto options = options_of<c10d::AllgatherOptions>(impl, blocking_);
  std::vector<Tensors> lists{without_grad(outputs)};
  Tensors inputs{input};
  return started(impl, outputs, inputs,
                 [&] { return impl.backend().allgather(lists, inputs, options); });
}

Work ProcessGroup::all_gather_into_tensor_async(at::Tensor& output, const at::Tensor& input) const {
  const auto& impl = checked(impl_);
  at::Tensor given = input;
  check_tensors(impl, Operation::all_gather_into_tensor, output, input);
  expect_multiple(Operation::all_gather_into_tensor, output, input, impl.size);
  const auto options = options_of<c10d::AllgatherOptions>(impl, blocking_);
  at::Tensor result = without_grad(output);
  return started(impl, {output}, {input},
                 [&] { return impl.backend()._allgather_base(result, given, options); });
}

Work ProcessGroup::gather_async(Tensors& outputs, const at::Tensor& input, int dst) const {
  const auto& impl = checked(impl_);
  check_rank(Operation::gather, "dst", dst, impl.size);
  check_count(impl, Operation::gather, "outputs", outputs.size(), impl.rank == dst);
  check_tensors(impl, Operation::gather, input, outputs);
  auto options = options_of<c10d::GatherOptions>(impl, blocking_);
  options.rootRank = dst;
  std::vector<Tensors> lists;
  if (impl.rank == dst) lists.push_back(without_grad(outputs));
  Tensors inputs{input};
  return started(impl, outputs, inputs,
                 [&] { return impl.backend().gather(lists, inputs, options); });
}

Work ProcessGroup::scatter_async(at::Tensor& output, const Tensors& inputs, int src) const {
  const auto& impl = checked(impl_);
  check_rank(Operation::scatter, "src", src, impl.size);
  check_count(impl, Operation::scatter, "inputs", inputs.size(), impl.rank == src);
  check_tensors(impl, Operation::scatter, output, inputs);
  auto options = options_of<c10d::ScatterOptions>(impl, blocking_);
  options.rootRank = src;
  std::vector<Tensors> lists;
  if (impl.rank == src) lists.push_back(inputs);
  Tensors outputs{without_grad(output)};
  return started(impl, {output}, inputs,
                 [&] { return impl.backend().scatter(outputs, lists, options); });
}

Work ProcessGroup::reduce_scatter_async(at::Tensor& output, const Tensors& inputs,
                                        ReduceOp op) const {
  const auto& impl = checked(impl_);
  check_count(impl, Operation::reduce_scatter, "inputs", inputs.size());
  check_tensors(impl, Operation::reduce_scatter, output, inputs);
  const auto options = options_of<c10d::ReduceScatterOptions>(impl, blocking_, op);
  Tensors outputs{without_grad(output)};
  std::vector<Tensors> lists{inputs};
  return started(
      impl, {output}, inputs,
      [&] { return impl.backend().reduce_scatter(outputs, lists, options); }, /*p2p=*/true);
}

Work ProcessGroup::reduce_scatter_tensor_async(at::Tensor& output, const at::Tensor& input,
                                               ReduceOp op) const {
  const auto& impl = checked(impl_);
  at::Tensor given = input;
  check_tensors(impl, Operation::reduce_scatter_tensor, output, input);
  expect_multiple(Operation::reduce_scatter_tensor, input, output, impl.size);
  const auto options = options_of<c10d::ReduceScatterOptions>(impl, blocking_, op);
  at::Tensor result = without_grad(output);
  return started(
      impl, {output}, {input},
      [&] { return impl.backend()._reduce_scatter_base(result, given, options); }, /*p2p=*/true);
}

Work ProcessGroup::all_to_all_async(Tensors& outputs, const Tensors& inputs) const {
  const auto& impl = checked(impl_);
  Tensors given = inputs;
  check_count(impl, Operation::all_to_all, "outputs", outputs.size());
  check_count(impl, Operation::all_to_all, "inputs", inputs.size());
  check_tensors(impl, Operation::all_to_all, outputs, inputs);
  const auto options = options_of<c10d::AllToAllOptions>(impl, blocking_);
  Tensors results = without_grad(outputs);
  return started(impl, outputs, inputs,
                 [&] { return impl.backend().alltoall(results, given, options); });
}

Work ProcessGroup::all_to_all_single_async(at::Tensor& output, const at::Tensor& input,
                                           const std::vector<int64_t>& output_splits,
                                           const std::vector<int64_t>& input_splits) const {
  const auto& impl = checked(impl_);
  at::Tensor given = input;
  auto rows_in = input_splits, rows_out = output_splits;
  constexpr Operation operation = Operation::all_to_all_single;
  check_tensors(impl, operation, output, input);
  const auto received = rows_of_ranks(operation, "output_splits", output, output_splits, impl.size);
  const auto sent = rows_of_ranks(operation, "input_splits", input, input_splits, impl.size);
  const auto own = static_cast<size_t>(impl.rank);
  if (sent[own] != received[own]) {
    throw UsageError("all_to_all_single: rank " + std::to_string(impl.rank) + " sends itself " +
                         std::to_string(sent[own]) + " rows and receives " +
                         std::to_string(received[own]),
                     "a rank's own entry is the same in input_splits and output_splits");
  }
  const auto options = options_of<c10d::AllToAllOptions>(impl, blocking_);
  at::Tensor result = without_grad(output);
  return started(impl, {output}, {input}, [&] {
    return impl.backend().alltoall_base(result, given, rows_out, rows_in, options);
  });
}

Work ProcessGroup::barrier_async() const {
  const auto& impl = checked(impl_);
  auto options = options_of<c10d::BarrierOptions>(impl, blocking_);
  if (impl.device().is_cuda()) options.device_ids = {impl.device().index()};
  return started(impl, {}, {}, [&] { return impl.backend().barrier(options); });
}

at::Tensor common_empty(const ProcessGroup& group, int64_t numel, at::ScalarType dtype) {
  if (!group) throw UsageError("common_empty: the process group is null");
  if (numel < 0)
    throw UsageError("common_empty: " + std::to_string(numel) + " elements, expected 0 or more");
  impl_of(group).backend();  // Throws once the group is closed.
  const auto backend = unchecked_backend(impl_of(group).handle());
  auto* const ours = dynamic_cast<backends::TensorBackend*>(backend.get());
  return ours ? ours->allocate_common(numel, dtype) : at::Tensor();
}

void observe_calls(const ProcessGroup& group, std::shared_ptr<CallObserver> observer) {
  if (!group) throw UsageError("observe_calls: the process group is null");
  set_call_observer(impl_of(group).backend(), std::move(observer));
}

void ProcessGroup::note_steps(int64_t steps) const noexcept {
  if (!impl_) return;
  // Written by one thread, that of the loop.
  if (steps > impl_->steps->load(std::memory_order_relaxed))
    impl_->steps->store(steps, std::memory_order_relaxed);
}

}  // namespace lockstep
