#include "lockstep/comm/backends/gloo/gloo.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "lockstep/base/error.h"

namespace lockstep::gloo {
namespace {

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

/// LibTorch's cuts the larger tensor along its first dimension, into parts that must have the
/// smaller one's shape. Only the number of elements counts here: [size, ...] is as good.
class Gloo final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    at::Tensor whole = flat(output), part = flat(input);
    return ProcessGroupGloo::_allgather_base(whole, part, options);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    at::Tensor part = flat(output), whole = flat(input);
    return ProcessGroupGloo::_reduce_scatter_base(part, whole, options);
  }
  // Gloo refuses to receive an empty tensor from any rank.
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override {
    if (tensors.size() != 1 || tensors[0].numel() > 0)
      return ProcessGroupGloo::recvAnysource(tensors, tag);
    std::vector<at::Tensor> unread{at::empty({1}, tensors[0].options())};
    return ProcessGroupGloo::recvAnysource(unread, tag);
  }
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
