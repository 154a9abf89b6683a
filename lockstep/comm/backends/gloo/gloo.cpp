#include "lockstep/comm/backends/gloo/gloo.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/socket.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/backends/gloo/gloo_dtypes.h"
#include "lockstep/comm/backends/gloo/own_messages.h"
#include "lockstep/comm/checks/call_signature.h"
#include "lockstep/comm/checks/failure_kind.h"

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
    return own_messages_.send(tensors[0], tag);
  }
  WorkPtr recv(Tensors& tensors, int src, int tag) override {
    if (src != getRank() || tensors.size() != 1) return ProcessGroupGloo::recv(tensors, src, tag);
    return own_messages_.recv(tensors[0], tag);
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
  OwnMessages own_messages_{getRank()};
};

uint16_t port_of(const sockaddr_storage& address) {
  sockaddr_in in{};  // Of both families the port stands at one place.
  static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));
  std::memcpy(&in, &address, sizeof(in));
  return ntohs(in.sin_port);
}

/// Where another rank listens, as its Gloo has told the others: its host's name and an address,
/// each behind its size. None where it has not, or has told otherwise.
std::optional<sockaddr_storage> place_of(const BackendOptions& options, int rank) {
  const std::string key = "0/" + std::to_string(rank);
  if (!options.store->check({key})) return std::nullopt;
  const std::string told = options.store->get_to_str(key);
  uint64_t name = 0;
  sockaddr_storage address{};
  if (told.size() < sizeof(name)) return std::nullopt;
  std::memcpy(&name, told.data(), sizeof(name));
  const size_t at = sizeof(name) + std::min<uint64_t>(name, told.size()) + sizeof(uint64_t);
  if (told.size() < at + sizeof(address)) return std::nullopt;
  std::memcpy(&address, told.data() + at, sizeof(address));
  const bool known = address.ss_family == AF_INET || address.ss_family == AF_INET6;
  return known ? std::optional(address) : std::nullopt;
}

/// After Gloo has found no connection in time: throws TimeoutError naming the ranks that have told
/// where they listen, and from where nothing answers.
void expect_peers(const BackendOptions& options) {
  constexpr std::chrono::milliseconds kEach{500}, kAll{2000};
  const auto names = names_or_numbers(options.global_ranks, options.size);
  const auto end = std::chrono::steady_clock::now() + kAll;
  Failure failure{.kind = Failure::Kind::late, .waited_ms = options.timeout.count()};
  std::vector<std::string> silent;
  for (int rank = 0; rank < options.size && std::chrono::steady_clock::now() < end; ++rank) {
    const auto place = rank == options.rank ? std::nullopt : place_of(options, rank);
    if (!place) continue;
    const std::string host = numeric_text(*place);
    const uint16_t port = port_of(*place);
    try {
      connect_to(host, port, kEach);
    } catch (const TimeoutError&) {
      const int name = names[static_cast<size_t>(rank)];
      silent.push_back("rank " + std::to_string(name) + " at " + endpoint_text(host, port));
      failure.ranks.push_back({name, failure.kind});
    } catch (const CommError&) {
      // It answers: it has given up, too.
    }
  }
  if (silent.empty()) return;
  throw TimeoutError("rank " + std::to_string(names[static_cast<size_t>(options.rank)]) +
                         ": forming the group '" + options.group_name + "' over gloo: within " +
                         seconds_text(options.timeout) + " nothing answers from " +
                         join(silent, ", "),
                     "the hosts must reach each other at these addresses: GLOO_SOCKET_IFNAME, or "
                     "the option `interface`, names the network interface; else a firewall drops "
                     "what is sent",
                     failure);
}

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
  try {
    auto backend = c10::make_intrusive<Gloo>(options.store, options.rank, options.size, gloo);
    backend->setTimeout(options.timeout);
    return {std::move(backend), kTraits};
  } catch (const std::exception&) {
    if (failure_kind(std::current_exception()) == FailureKind::timeout) expect_peers(options);
    throw;
  }
}

}  // namespace lockstep::gloo
