#include "lockstep/comm/backends/gloo/gloo.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "lockstep/base/error.h"
#include "lockstep/comm/backends/gloo/gloo_dtypes.h"
#include "lockstep/comm/backends/gloo/own_messages.h"
#include "lockstep/comm/checks/call_signature.h"

namespace lockstep::gloo {
namespace {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

std::shared_ptr<::gloo::transport::Device> make_device(const BackendOptions& options) {
  using Gloo = c10d::ProcessGroupGloo;
  try {
    if (!options.interface.empty()) return Gloo::createDeviceForInterface(options.interface);
    return Gloo::createDeviceForHostname(options.address);
  } catch (const std::exception& error) {
    if (!options.interface.empty()) {
      throw UsageError("gloo: no usable network interface '" + options.interface + "'",
                       "`ip -brief address` lists them; set GLOO_SOCKET_IFNAME or the option "
                       "`interface` to one, or leave both unset");
    }
    throw CommError("gloo: cannot use the address " + options.address + " of this host",
                    "set GLOO_SOCKET_IFNAME to the interface that reaches the other hosts");
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

  // Gloo has no connection from a rank to itself.
  WorkPtr send(Tensors& tensors, int dst, int tag) override {
    if (dst != getRank() || tensors.size() != 1) return ProcessGroupGloo::send(tensors, dst, tag);
    return own_messages_.send(tensors[0], tag, options_->timeout);
  }
  WorkPtr recv(Tensors& tensors, int src, int tag) override {
    if (src != getRank() || tensors.size() != 1) return ProcessGroupGloo::recv(tensors, src, tag);
    return own_messages_.recv(tensors[0], tag, options_->timeout);
  }
  // Gloo refuses to receive an empty tensor from any rank.
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    if (tensors.size() == 1 && own_messages_.has_sent(tag)) return recv(tensors, getRank(), tag);
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

  const int name_ = name();  ///< This rank's number in the default group.
  OwnMessages own_messages_{getRank(), name_};
};

}  // namespace

BackendInfo info() {
  return {"gloo", true, {}, {}, kTraits};
}

MadeBackend make(const BackendOptions& options) {
  auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout);
  gloo->devices.push_back(make_device(options));
  gloo->group_name = options.group_name;
  gloo->global_ranks_in_group.assign(options.global_ranks.begin(), options.global_ranks.end());
  return {c10::make_intrusive<Gloo>(options.store, options.rank, options.size, std::move(gloo)),
          kTraits};
}

}  // namespace lockstep::gloo
