#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>

#include "lockstep/base/error.h"
#include "lockstep/comm/native_store.h"
#include "lockstep/rpc/transport.h"

namespace lockstep::rpc::detail {
namespace {

namespace native = torch::distributed::rpc;

class TensorPipeTransport final : public Transport {
 public:
  explicit TensorPipeTransport(TransportSetup setup) {
    // On one host nothing listens on the network.
    std::vector<std::string> transports{"shm"};
    if (!setup.one_host) transports.emplace_back("uv");
    const native::TensorPipeRpcBackendOptions options(
        setup.threads, transports, std::nullopt,
        std::chrono::duration<float>(setup.timeout).count(), "env://");
    agent_ = std::make_shared<native::TensorPipeAgent>(
        native_store(setup.store), setup.name, static_cast<native::worker_id_t>(setup.rank),
        setup.size, options, std::unordered_map<std::string, native::DeviceMap>(),
        std::vector<c10::Device>(), std::move(setup.callback));
  }

  const std::shared_ptr<native::RpcAgent>& agent() const override { return agent_; }
  void start() override { agent_->start(); }
  void stop() override { agent_->shutdown(); }

 private:
  std::shared_ptr<native::RpcAgent> agent_;
};

}  // namespace

std::unique_ptr<Transport> make_tensorpipe_transport(TransportSetup setup) {
  return std::make_unique<TensorPipeTransport>(std::move(setup));
}

}  // namespace lockstep::rpc::detail
