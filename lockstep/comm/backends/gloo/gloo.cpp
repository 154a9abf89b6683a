#include "lockstep/comm/backends/gloo/gloo.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <array>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "lockstep/base/error.h"
#include "lockstep/comm/checks/call_signature.h"

namespace lockstep::gloo {
namespace {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Op = c10d::ReduceOp;

bool knows(at::ScalarType dtype) {
  constexpr std::array kKnown{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar,
                              at::kByte,  at::kBool,   at::kInt,  at::kLong};
  return std::ranges::find(kKnown, dtype) != kKnown.end();
}

/// The same memory as elements that Gloo moves: it knows nine dtypes only.
at::Tensor movable(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || knows(tensor.scalar_type()))
    return tensor;
  const at::AutoDispatchBelowADInplaceOrView outside_autograd;
  switch (tensor.element_size()) {
    case 1:
      return tensor.view(at::kByte);
    case 2:
      return tensor.view(at::kHalf);
    case 4:
      return tensor.view(at::kInt);
    case 8:
      return tensor.view(at::kLong);
    default:
      return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  }
}

template <class Each>
std::vector<Each> movable(const std::vector<Each>& list) {
  std::vector<Each> all;
  for (const auto& one : list) all.push_back(movable(one));
  return all;
}

/// What to do about it; empty where Gloo has the reduction.
std::string remedy(at::ScalarType dtype, Op::RedOpType op) {
  const bool bitwise = op >= Op::BAND && op <= Op::BXOR;
  if (op == Op::PREMUL_SUM) return "scale the tensor before and use sum";
  if (at::isComplexType(dtype))
    return op == Op::SUM || op == Op::AVG ? "" : "complex numbers have sum and avg only";
  if (!knows(dtype)) return "convert the tensor first, for instance to float32 or int64";
  const bool fractions = at::isFloatingType(dtype);
  if (bitwise && fractions) return "bitwise reductions are for integers and bool";
  if (op == Op::AVG && !fractions) return "use sum and divide, or convert the tensor to float32";
  return {};
}

/// The reduction by which Gloo does what was asked for: of bool a sum is "or" and a product "and",
/// as with the other backends. Throws UsageError for what Gloo does not have of this dtype.
/// `rank`: this one's number in the default group.
Op reduction_of(int rank, Operation operation, const Op& op, const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  if (const std::string hint = remedy(dtype, op.op_); !hint.empty()) {
    const CallSignature call{operation, op.op_, -1, 0, {signature_of(tensor)}, {}, {}, {}};
    throw UsageError("rank " + std::to_string(rank) + ": " + describe(call, {}) +
                         ": gloo does not have this reduction of this dtype",
                     hint);
  }
  if (dtype != at::kBool) return op;
  return op.op_ == Op::SUM ? Op(Op::MAX) : op.op_ == Op::PRODUCT ? Op(Op::MIN) : op;
}

std::shared_ptr<::gloo::transport::Device> make_device(const BackendOptions& options) {
  using Gloo = c10d::ProcessGroupGloo;
  try {
    if (!options.interface.empty()) return Gloo::createDeviceForInterface(options.interface);
    return Gloo::createDeviceForHostname(options.address);
  } catch (const std::exception&) {
    throw UsageError("gloo: no usable " + (options.interface.empty()
                                               ? "address " + options.address
                                               : "network interface '" + options.interface + "'"),
                     "set GLOO_SOCKET_IFNAME, or the option `interface`, to the interface that "
                     "reaches the other hosts; `ip -brief address` lists them");
  }
}

at::Tensor flat(const at::Tensor& tensor) {
  return tensor.is_contiguous() ? tensor.view(-1) : tensor;
}

/// LibTorch's, for all dtypes where elements are only moved, and with errors that say what to do
/// where they are reduced.
///
/// LibTorch's cuts the larger tensor along its first dimension, into parts that must have the
/// smaller one's shape. Only the number of elements counts here: [size, ...] is as good.
class Gloo final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return ProcessGroupGloo::allreduce(tensors, reducing(Operation::all_reduce, tensors, options));
  }
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return ProcessGroupGloo::allreduce_sparse(
        tensors, reducing(Operation::all_reduce_sparse, tensors, options));
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return ProcessGroupGloo::allreduce_coalesced(
        tensors, reducing(Operation::all_reduce_coalesced, tensors, options));
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return ProcessGroupGloo::reduce(tensors, reducing(Operation::reduce, tensors, options));
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return ProcessGroupGloo::reduce_scatter(outputs, inputs,
                                            reducing(Operation::reduce_scatter, outputs, options));
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    at::Tensor part = flat(output), whole = flat(input);
    return ProcessGroupGloo::_reduce_scatter_base(
        part, whole, reducing(Operation::reduce_scatter_tensor, {output}, options));
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return ProcessGroupGloo::reduce_scatter_tensor_coalesced(
        outputs, inputs, reducing(Operation::reduce_scatter_tensor_coalesced, outputs, options));
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Tensors moved = movable(tensors);
    return ProcessGroupGloo::broadcast(moved, options);
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    TensorLists results = movable(outputs);
    Tensors given = movable(inputs);
    return ProcessGroupGloo::allgather(results, given, options);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    at::Tensor whole = movable(flat(output)), part = movable(flat(input));
    return ProcessGroupGloo::_allgather_base(whole, part, options);
  }
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    TensorLists results = movable(outputs);
    Tensors given = movable(inputs);
    return ProcessGroupGloo::allgather_coalesced(results, given, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    Tensors results = movable(outputs), given = movable(inputs);
    return ProcessGroupGloo::allgather_into_tensor_coalesced(results, given, options);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    TensorLists results = movable(outputs);
    Tensors given = movable(inputs);
    return ProcessGroupGloo::gather(results, given, options);
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override {
    Tensors results = movable(outputs);
    TensorLists given = movable(inputs);
    return ProcessGroupGloo::scatter(results, given, options);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override {
    at::Tensor result = movable(output), given = movable(input);
    return ProcessGroupGloo::alltoall_base(result, given, output_splits, input_splits, options);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    Tensors results = movable(outputs), given = movable(inputs);
    return ProcessGroupGloo::alltoall(results, given, options);
  }

  WorkPtr send(Tensors& tensors, int dst, int tag) override {
    expect_another(Operation::send, dst);
    return ProcessGroupGloo::send(tensors, dst, tag);
  }
  WorkPtr recv(Tensors& tensors, int src, int tag) override {
    expect_another(Operation::recv, src);
    return ProcessGroupGloo::recv(tensors, src, tag);
  }
  // Gloo refuses to receive an empty tensor from any rank.
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    if (tensors.size() != 1 || tensors[0].numel() > 0)
      return ProcessGroupGloo::recvAnysource(tensors, tag);
    Tensors unread{at::empty({1}, tensors[0].options())};
    return ProcessGroupGloo::recvAnysource(unread, tag);
  }

 private:
  int name() const {
    const auto& names = options_->global_ranks_in_group;
    return names_or_numbers({names.begin(), names.end()},
                            getSize())[static_cast<size_t>(getRank())];
  }
  template <class CallOptions>
  CallOptions reducing(Operation operation, const Tensors& tensors, CallOptions options) const {
    for (const auto& tensor : tensors)
      options.reduceOp = reduction_of(name_, operation, options.reduceOp, tensor);
    return options;
  }
  /// Gloo has no connection from a rank to itself.
  void expect_another(Operation operation, int rank) const {
    if (rank != getRank()) return;
    throw UsageError("rank " + std::to_string(name_) + ": " +
                         std::string(operation_name(operation)) +
                         ": gloo has no messages of a rank to itself",
                     "copy the tensor");
  }

  const int name_ = name();  ///< This rank's number in the default group.
};

}  // namespace

BackendInfo info() {
  return {"gloo", true, {}, {}, kTraits};
}

// Gloo waits for a first connection for five time-outs. What it waits for in the store is not cut
// short: see watched_store.
MadeBackend make(const BackendOptions& options) {
  constexpr int kGlooWaits = 5;
  const auto shortest = std::chrono::milliseconds(1);
  auto gloo =
      c10d::ProcessGroupGloo::Options::create(std::max(options.timeout / kGlooWaits, shortest));
  gloo->devices.push_back(make_device(options));
  gloo->group_name = options.group_name;
  gloo->global_ranks_in_group.assign(options.global_ranks.begin(), options.global_ranks.end());
  auto backend = c10::make_intrusive<Gloo>(options.store, options.rank, options.size, gloo);
  backend->setTimeout(options.timeout);
  return {std::move(backend), kTraits};
}

}  // namespace lockstep::gloo
