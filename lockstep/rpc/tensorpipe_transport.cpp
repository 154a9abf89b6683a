#include <tensorpipe/transport/uv/factory.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/rpc/guarded_agent.h"
#include "lockstep/rpc/transport.h"

namespace lockstep::rpc::detail {
namespace {

namespace native = torch::distributed::rpc;

/// Where LibTorch's agent looks for a worker's address.
std::string address_key(int id) {
  return "addrs/" + inner_name(id);
}

/// TCP on loopback, of which TensorPipe's own makers have none: theirs listens where other hosts
/// may come.
const char* loopback() {
  static constexpr const char* kName = "lockstep_loopback";
  static const bool once = [] {
    native::TensorPipeTransportRegistry()->Register(kName, [] {
      return std::make_unique<native::TransportRegistration>(native::TransportRegistration{
          tensorpipe::transport::uv::create(), /*priority=*/0, "127.0.0.1"});
    });
    return true;
  }();
  static_cast<void>(once);
  return kName;
}

/// On one host nothing listens on the network.
std::vector<std::string> names_of(Carrier carrier) {
  switch (carrier) {
    case Carrier::polled_memory:
      return {"shm"};
    case Carrier::loopback:
      return {loopback()};
    case Carrier::network:
      break;
  }
  return {"uv"};
}

/// How large tensors go. All of LibTorch's would open ports for other hosts also on a single one.
std::optional<std::vector<std::string>> channels_of(Carrier carrier) {
  if (carrier == Carrier::network) return std::nullopt;
  std::vector<std::string> names{"basic"};
  if (native::TensorPipeChannelRegistry()->Has("cma")) names.emplace_back("cma");
  return names;
}

class TensorPipeTransport final : public Transport {
 public:
  explicit TensorPipeTransport(TransportSetup setup)
      : id_(setup.id), addresses_(c10::make_intrusive<c10d::HashStore>()) {
    const std::vector<std::string> transports = names_of(setup.carrier);
    const native::TensorPipeRpcBackendOptions options(
        setup.threads, transports, channels_of(setup.carrier),
        std::chrono::duration<float>(setup.timeout).count(), "env://");
    // A group of a fixed size, as LibTorch takes its lock for such ones only. The size of 0 lets it
    // wait for nobody: `add_worker` makes the others known.
    inner_ = std::make_shared<native::TensorPipeAgent>(
        addresses_, inner_name(setup.id), static_cast<native::worker_id_t>(setup.id),
        /*worldSize=*/0, options, std::unordered_map<std::string, native::DeviceMap>(),
        std::vector<c10::Device>(), std::move(setup.callback));
    guarded_ = std::make_shared<GuardedAgent>(setup.name, setup.id, inner_, std::move(setup.guard));
    agent_ = guarded_;
  }

  const std::shared_ptr<native::RpcAgent>& agent() const override { return agent_; }
  void start() override { agent_->start(); }
  std::string address() override {
    const auto bytes = addresses_->get(address_key(id_));
    return {bytes.begin(), bytes.end()};
  }
  void add_worker(int id, const std::string& name, const std::string& address) override {
    if (id != id_) {
      addresses_->set(address_key(id), std::vector<uint8_t>(address.begin(), address.end()));
      const native::WorkerInfo inner(inner_name(id), static_cast<native::worker_id_t>(id));
      inner_->updateGroupMembership(inner, {}, {}, /*isJoin=*/true);
    }
    guarded_->add(id, name);
  }
  void stop() override { agent_->shutdown(); }

 private:
  const int id_;
  const c10::intrusive_ptr<c10d::HashStore> addresses_;  ///< Of this process alone.
  std::shared_ptr<native::TensorPipeAgent> inner_;
  std::shared_ptr<GuardedAgent> guarded_;
  std::shared_ptr<native::RpcAgent> agent_;
};

}  // namespace

std::unique_ptr<Transport> make_tensorpipe_transport(TransportSetup setup) {
  return std::make_unique<TensorPipeTransport>(std::move(setup));
}

}  // namespace lockstep::rpc::detail
