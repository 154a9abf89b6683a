#include "lockstep/comm/process_group.h"

#include <ATen/ATen.h>

#include <nlohmann/json.hpp>
#include <numeric>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lockstep/base/error.h"
#include "lockstep/comm/checks/translate.h"
#include "lockstep/comm/group_impl.h"

namespace lockstep {
namespace {

using Tensors = std::vector<at::Tensor>;

c10d::ReduceOp native_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::avg:
      return c10d::ReduceOp::AVG;
    case ReduceOp::product:
      return c10d::ReduceOp::PRODUCT;
    case ReduceOp::min:
      return c10d::ReduceOp::MIN;
    case ReduceOp::max:
      return c10d::ReduceOp::MAX;
    case ReduceOp::band:
      return c10d::ReduceOp::BAND;
    case ReduceOp::bor:
      return c10d::ReduceOp::BOR;
    case ReduceOp::bxor:
      return c10d::ReduceOp::BXOR;
  }
  throw UsageError("an unknown reduction");
}

ProcessGroup::Impl& checked(const std::shared_ptr<ProcessGroup::Impl>& impl) {
  if (!impl) throw UsageError("a null process group: this rank is not of that group");
  return *impl;
}

void check_rank(const ProcessGroup::Impl& impl, const char* operation, const char* argument,
                int rank) {
  if (rank >= 0 && rank < impl.size) return;
  throw UsageError(std::string(operation) + ": " + argument + "=" + std::to_string(rank) +
                   " is out of range; the group has ranks 0 to " + std::to_string(impl.size - 1));
}

/// Blocking calls say so to our own backends, which then work in the calling thread. To NCCL it
/// would mean another stream.
thread_local bool blocking = false;
bool is_async(const ProcessGroup::Impl& impl) {
  return !blocking || (impl.transport() != "shm" && impl.transport() != "hierarchical");
}
class Blocking {
 public:
  Blocking() { blocking = true; }
  ~Blocking() { blocking = false; }
};

void check_count(const ProcessGroup::Impl& impl, const char* operation, const char* argument,
                 size_t count, size_t expected) {
  if (count == expected) return;
  throw UsageError(std::string(operation) + ": " + argument + " has " + std::to_string(count) +
                   " tensors on rank " + std::to_string(impl.rank) + ", expected " +
                   std::to_string(expected) +
                   (expected == 0 ? " on a rank other than the root" : ", one a rank"));
}

/// The other backends take contiguous tensors only, at least in some operations.
bool takes_strided(const ProcessGroup::Impl& impl) {
  return impl.transport() == "shm" || impl.transport() == "mpi";
}

void check_tensor(const ProcessGroup::Impl& impl, const char* operation, const at::Tensor& tensor) {
  if (!tensor.defined()) throw UsageError(std::string(operation) + ": an undefined tensor");
  if (tensor.layout() == at::kStrided && !tensor.is_contiguous() && !takes_strided(impl)) {
    throw UsageError(std::string(operation) + ": the tensor is not contiguous",
                     "pass tensor.contiguous(), and copy the result back where it is an output");
  }
}

void check_tensors(const ProcessGroup::Impl& impl, const char* operation, const Tensors& tensors) {
  for (const auto& tensor : tensors) check_tensor(impl, operation, tensor);
}

void check_multiple(const char* operation, const at::Tensor& large, const at::Tensor& small,
                    int size) {
  if (large.numel() == small.numel() * size) return;
  throw UsageError(std::string(operation) + ": the larger tensor has " +
                   std::to_string(large.numel()) + " elements, expected " + std::to_string(size) +
                   " times the smaller one's " + std::to_string(small.numel()));
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
  if (timeout.count() <= 0) throw UsageError("set_timeout: expected a time above 0");
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

Work ProcessGroup::all_reduce_async(at::Tensor& tensor, ReduceOp op) const {
  auto& impl = checked(impl_);
  check_tensor(impl, "all_reduce", tensor);
  c10d::AllreduceOptions options;
  options.reduceOp = native_op(op);
  options.timeout = impl.timeout;
  options.asyncOp = is_async(impl);
  Tensors tensors{tensor};
  auto work = translated([&] { return impl.backend().allreduce(tensors, options); });
  return impl.make_work(std::move(work), tensors, {});
}

Work ProcessGroup::all_reduce_coalesced_async(Tensors& tensors, ReduceOp op) const {
  auto& impl = checked(impl_);
  if (tensors.empty()) throw UsageError("all_reduce_coalesced: no tensors");
  check_tensors(impl, "all_reduce_coalesced", tensors);
  c10d::AllreduceCoalescedOptions options;
  options.reduceOp = native_op(op);
  options.timeout = impl.timeout;
  options.asyncOp = is_async(impl);
  auto work = translated([&] { return impl.backend().allreduce_coalesced(tensors, options); });
  return impl.make_work(std::move(work), tensors, {});
}

Work ProcessGroup::reduce_async(at::Tensor& tensor, int dst, ReduceOp op) const {
  auto& impl = checked(impl_);
  check_rank(impl, "reduce", "dst", dst);
  check_tensor(impl, "reduce", tensor);
  c10d::ReduceOptions options;
  options.reduceOp = native_op(op);
  options.rootRank = dst;
  options.timeout = impl.timeout;
  options.asyncOp = is_async(impl);
  Tensors tensors{tensor};
  auto work = translated([&] { return impl.backend().reduce(tensors, options); });
  return impl.make_work(std::move(work), tensors, {});
}

Work ProcessGroup::broadcast_async(at::Tensor& tensor, int src) const {
  auto& impl = checked(impl_);
  check_rank(impl, "broadcast", "src", src);
  check_tensor(impl, "broadcast", tensor);
  c10d::BroadcastOptions options;
  options.rootRank = src;
  options.timeout = impl.timeout;
  options.asyncOp = is_async(impl);
  Tensors tensors{tensor};
  auto work = translated([&] { return impl.backend().broadcast(tensors, options); });
  return impl.make_work(std::move(work), tensors, {});
}

Work ProcessGroup::all_gather_async(Tensors& outputs, const at::Tensor& input) const {
  auto& impl = checked(impl_);
  check_count(impl, "all_gather", "outputs", outputs.size(), static_cast<size_t>(impl.size));
  check_tensor(impl, "all_gather", input);
  check_tensors(impl, "all_gather", outputs);
  c10d::AllgatherOptions options;
  options.timeout = impl.timeout;
  options.asyncOp = is_async(impl);
  std::vector<Tensors> lists{outputs};
  Tensors inputs{input};
  auto work = translated([&] { return impl.backend().allgather(lists, inputs, options); });
  return impl.make_work(std::move(work), outputs, inputs);
}

Work ProcessGroup::all_gather_into_tensor_async(at::Tensor& output, const at::Tensor& input) const {
  auto& impl = checked(impl_);
  check_tensors(impl, "all_gather_into_tensor", {output, input});
  check_multiple("all_gather_into_tensor", output, input, impl.size);
  c10d::AllgatherOptions options;
  options.timeout = impl.timeout;
  options.asyncOp = is_async(impl);
  at::Tensor in = input;
  auto work = translated([&] { return impl.backend()._allgather_base(output, in, options); });
  return impl.make_work(std::move(work), {output}, {input});
}

Work ProcessGroup::gather_async(Tensors& outputs, const at::Tensor& input, int dst) const {
  auto& impl = checked(impl_);
  check_rank(impl, "gather", "dst", dst);
  check_count(impl, "gather", "outputs", outputs.size(),
              impl.rank == dst ? static_cast<size_t>(impl.size) : 0);
  check_tensor(impl, "gather", input);
  check_tensors(impl, "gather", outputs);
  c10d::GatherOptions options;
  options.rootRank = dst;
  options.timeout = impl.timeout;
  options.asyncOp = is_async(impl);
  std::vector<Tensors> lists;
  if (impl.rank == dst) lists.push_back(outputs);
  Tensors inputs{input};
  auto work = translated([&] { return impl.backend().gather(lists, inputs, options); });
  return impl.make_work(std::move(work), outputs, inputs);
}

Work ProcessGroup::scatter_async(at::Tensor& output, const Tensors& inputs, int src) const {
  auto& impl = checked(impl_);
  check_rank(impl, "scatter", "src", src);
  check_count(impl, "scatter", "inputs", inputs.size(),
              impl.rank == src ? static_cast<size_t>(impl.size) : 0);
  check_tensor(impl, "scatter", output);
  check_tensors(impl, "scatter", inputs);
  c10d::ScatterOptions options;
  options.rootRank = src;
  options.timeout = impl.timeout;
  options.asyncOp = is_async(impl);
  std::vector<Tensors> lists;
  if (impl.rank == src) lists.push_back(inputs);
  Tensors outputs{output};
  auto work = translated([&] { return impl.backend().scatter(outputs, lists, options); });
  return impl.make_work(std::move(work), outputs, inputs);
}

Work ProcessGroup::reduce_scatter_async(at::Tensor& output, const Tensors& inputs,
                                        ReduceOp op) const {
  auto& impl = checked(impl_);
  check_count(impl, "reduce_scatter", "inputs", inputs.size(), static_cast<size_t>(impl.size));
  check_tensor(impl, "reduce_scatter", output);
  check_tensors(impl, "reduce_scatter", inputs);
  c10d::ReduceScatterOptions options;
  options.reduceOp = native_op(op);
  options.timeout = impl.timeout;
  options.asyncOp = is_async(impl);
  Tensors outputs{output};
  std::vector<Tensors> lists{inputs};
  auto work = translated([&] { return impl.backend().reduce_scatter(outputs, lists, options); });
  return impl.make_work(std::move(work), outputs, inputs);
}

Work ProcessGroup::reduce_scatter_tensor_async(at::Tensor& output, const at::Tensor& input,
                                               ReduceOp op) const {
  auto& impl = checked(impl_);
  check_tensors(impl, "reduce_scatter_tensor", {output, input});
  check_multiple("reduce_scatter_tensor", input, output, impl.size);
  c10d::ReduceScatterOptions options;
  options.reduceOp = native_op(op);
  options.timeout = impl.timeout;
  options.asyncOp = is_async(impl);
  at::Tensor in = input;
  auto work = translated([&] { return impl.backend()._reduce_scatter_base(output, in, options); });
  return impl.make_work(std::move(work), {output}, {input});
}

Work ProcessGroup::all_to_all_async(Tensors& outputs, const Tensors& inputs) const {
  auto& impl = checked(impl_);
  check_count(impl, "all_to_all", "outputs", outputs.size(), static_cast<size_t>(impl.size));
  check_count(impl, "all_to_all", "inputs", inputs.size(), static_cast<size_t>(impl.size));
  check_tensors(impl, "all_to_all", outputs);
  check_tensors(impl, "all_to_all", inputs);
  c10d::AllToAllOptions options;
  options.timeout = impl.timeout;
  options.asyncOp = is_async(impl);
  Tensors in = inputs;
  auto work = translated([&] { return impl.backend().alltoall(outputs, in, options); });
  return impl.make_work(std::move(work), outputs, inputs);
}

Work ProcessGroup::all_to_all_single_async(at::Tensor& output, const at::Tensor& input,
                                           const std::vector<int64_t>& output_splits,
                                           const std::vector<int64_t>& input_splits) const {
  auto& impl = checked(impl_);
  check_tensors(impl, "all_to_all_single", {output, input});
  const auto check_splits = [&](const char* name, const std::vector<int64_t>& splits,
                                const at::Tensor& tensor) {
    const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
    const int64_t sum = std::accumulate(splits.begin(), splits.end(), int64_t{0});
    const bool fits = splits.empty()
                          ? rows % impl.size == 0
                          : splits.size() == static_cast<size_t>(impl.size) && sum == rows;
    if (!fits) {
      throw UsageError(std::string("all_to_all_single: ") + name + " do not cut " +
                       std::to_string(rows) + " rows into " + std::to_string(impl.size) +
                       " parts (" + std::to_string(splits.size()) + " splits, sum " +
                       std::to_string(sum) + "; none for even parts)");
    }
  };
  check_splits("output_splits", output_splits, output);
  check_splits("input_splits", input_splits, input);
  c10d::AllToAllOptions options;
  options.timeout = impl.timeout;
  options.asyncOp = is_async(impl);
  at::Tensor in = input;
  auto out_counts = output_splits;
  auto in_counts = input_splits;
  auto work = translated(
      [&] { return impl.backend().alltoall_base(output, in, out_counts, in_counts, options); });
  return impl.make_work(std::move(work), {output}, {input});
}

Work ProcessGroup::barrier_async() const {
  auto& impl = checked(impl_);
  c10d::BarrierOptions options;
  options.timeout = impl.timeout;
  options.asyncOp = is_async(impl);
  if (impl.device().is_cuda()) options.device_ids = {impl.device().index()};
  return impl.make_work(translated([&] { return impl.backend().barrier(options); }), {}, {});
}

Work ProcessGroup::isend(const at::Tensor& tensor, int dst, int tag) const {
  auto& impl = checked(impl_);
  check_rank(impl, "send", "dst", dst);
  check_tensor(impl, "send", tensor);
  Tensors tensors{tensor};
  auto work = translated([&] { return impl.backend().send(tensors, dst, tag); });
  return impl.make_work(std::move(work), {}, tensors, true);
}

Work ProcessGroup::irecv(at::Tensor& tensor, int src, int tag) const {
  auto& impl = checked(impl_);
  check_rank(impl, "recv", "src", src);
  check_tensor(impl, "recv", tensor);
  Tensors tensors{tensor};
  auto work = translated([&] { return impl.backend().recv(tensors, src, tag); });
  return impl.make_work(std::move(work), tensors, {}, true);
}

int ProcessGroup::recv_any(at::Tensor& tensor, int tag) const {
  auto& impl = checked(impl_);
  check_tensor(impl, "recv_any", tensor);
  Tensors tensors{tensor};
  auto native = translated([&] { return impl.backend().recvAnysource(tensors, tag); });
  const Work work = impl.make_work(std::move(native), tensors, {}, true);
  work.wait();
  return work.source_rank();
}

std::vector<Work> ProcessGroup::batch_isend_irecv(const std::vector<P2POp>& ops) const {
  auto& impl = checked(impl_);
  const bool grouped = impl.backend().supportsCoalescing();
  if (grouped) translated([&] { impl.backend().startCoalescing(); });
  std::vector<Work> works;
  Tensors all;
  for (const auto& op : ops) {
    at::Tensor tensor = op.tensor;
    all.push_back(tensor);
    works.push_back(op.kind == P2POp::Kind::send ? isend(tensor, op.peer, op.tag)
                                                 : irecv(tensor, op.peer, op.tag));
  }
  if (!grouped) return works;
  auto work = translated([&] { return impl.backend().endCoalescing(); });
  return {impl.make_work(std::move(work), all, {})};
}

namespace {

template <class Start>
void wait_here(Start start) {
  Work work = [&] {
    const Blocking here;
    return start();
  }();
  work.wait();
}

}  // namespace

void ProcessGroup::all_reduce(at::Tensor& tensor, ReduceOp op) const {
  wait_here([&] { return all_reduce_async(tensor, op); });
}
void ProcessGroup::all_reduce_coalesced(Tensors& tensors, ReduceOp op) const {
  wait_here([&] { return all_reduce_coalesced_async(tensors, op); });
}
void ProcessGroup::reduce(at::Tensor& tensor, int dst, ReduceOp op) const {
  wait_here([&] { return reduce_async(tensor, dst, op); });
}
void ProcessGroup::broadcast(at::Tensor& tensor, int src) const {
  wait_here([&] { return broadcast_async(tensor, src); });
}
void ProcessGroup::all_gather(Tensors& outputs, const at::Tensor& input) const {
  wait_here([&] { return all_gather_async(outputs, input); });
}
void ProcessGroup::all_gather_into_tensor(at::Tensor& output, const at::Tensor& input) const {
  wait_here([&] { return all_gather_into_tensor_async(output, input); });
}
void ProcessGroup::gather(Tensors& outputs, const at::Tensor& input, int dst) const {
  wait_here([&] { return gather_async(outputs, input, dst); });
}
void ProcessGroup::scatter(at::Tensor& output, const Tensors& inputs, int src) const {
  wait_here([&] { return scatter_async(output, inputs, src); });
}
void ProcessGroup::reduce_scatter(at::Tensor& output, const Tensors& inputs, ReduceOp op) const {
  wait_here([&] { return reduce_scatter_async(output, inputs, op); });
}
void ProcessGroup::reduce_scatter_tensor(at::Tensor& output, const at::Tensor& input,
                                         ReduceOp op) const {
  wait_here([&] { return reduce_scatter_tensor_async(output, input, op); });
}
void ProcessGroup::all_to_all(Tensors& outputs, const Tensors& inputs) const {
  wait_here([&] { return all_to_all_async(outputs, inputs); });
}
void ProcessGroup::all_to_all_single(at::Tensor& output, const at::Tensor& input,
                                     const std::vector<int64_t>& output_splits,
                                     const std::vector<int64_t>& input_splits) const {
  wait_here([&] { return all_to_all_single_async(output, input, output_splits, input_splits); });
}
void ProcessGroup::barrier() const {
  wait_here([&] { return barrier_async(); });
}
void ProcessGroup::send(const at::Tensor& tensor, int dst, int tag) const {
  isend(tensor, dst, tag).wait();
}
void ProcessGroup::recv(at::Tensor& tensor, int src, int tag) const {
  irecv(tensor, src, tag).wait();
}

}  // namespace lockstep
