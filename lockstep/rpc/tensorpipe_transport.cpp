#include <tensorpipe/channel/mpt/factory.h>
#include <tensorpipe/transport/context.h>
#include <tensorpipe/transport/uv/factory.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>

#include "lockstep/rpc/transport.h"

namespace lockstep::rpc::detail {
namespace {

namespace native = torch::distributed::rpc;

/// TCP at an address of ours. LibTorch's own makers guess one, from TP_SOCKET_IFNAME or this host's
/// name, and take loopback where that fails, which no other host reaches. Ours have no arguments
/// either. A process is one worker, and has one address.
std::string& own_host() {
  static std::string host;
  return host;
}

constexpr const char* kTcp = "lockstep_tcp";
constexpr const char* kLanes = "lockstep_lanes";

std::unique_ptr<native::TransportRegistration> make_tcp() {
  return std::make_unique<native::TransportRegistration>(native::TransportRegistration{
      tensorpipe::transport::uv::create(), /*priority=*/0, own_host()});
}

/// Large tensors over several connections, each with a thread of its own.
std::unique_ptr<native::ChannelRegistration> make_lanes() {
  constexpr int kConnections = 16;  // LibTorch's own number.
  std::vector<std::shared_ptr<tensorpipe::transport::Context>> contexts;
  std::vector<std::shared_ptr<tensorpipe::transport::Listener>> listeners;
  for (int i = 0; i < kConnections; ++i) {
    contexts.push_back(tensorpipe::transport::uv::create());
    listeners.push_back(contexts.back()->listen(own_host()));
  }
  return std::make_unique<native::ChannelRegistration>(native::ChannelRegistration{
      tensorpipe::channel::mpt::create(std::move(contexts), std::move(listeners)), /*priority=*/0});
}

void listen_at(const std::string& host) {
  const bool is_v6 = host.find(':') != std::string::npos;
  own_host() = is_v6 ? "[" + host + "]" : host;
  static const bool once = [] {
    native::TensorPipeTransportRegistry()->Register(kTcp, make_tcp);
    native::TensorPipeChannelRegistry()->Register(kLanes, make_lanes);
    return true;
  }();
  static_cast<void>(once);
}

/// How large tensors go, the best first: from memory to memory within a host, else over several
/// connections, else as all messages. LibTorch's own lanes would open ports for other hosts also on
/// a single one.
std::vector<std::string> channels_of(Carrier carrier) {
  std::vector<std::string> names;
  if (native::TensorPipeChannelRegistry()->Has("cma")) names.emplace_back("cma");
  if (carrier == Carrier::network) names.emplace_back(kLanes);
  names.emplace_back("basic");
  return names;
}

}  // namespace

std::shared_ptr<native::TensorPipeAgent> make_tensorpipe_agent(
    const WorkerSetup& setup, std::unique_ptr<native::RequestCallback> callback,
    const c10::intrusive_ptr<c10d::Store>& addresses) {
  listen_at(setup.host);
  // On one host that is polled nothing listens.
  const std::vector<std::string> transports{setup.carrier == Carrier::polled_memory ? "shm" : kTcp};
  const native::TensorPipeRpcBackendOptions options(
      setup.options.threads, transports, channels_of(setup.carrier),
      std::chrono::duration<float>(setup.options.timeout).count(), "env://");
  // A group of a fixed size, as LibTorch takes its lock for such ones only. The size of 0 lets it
  // wait for nobody: GuardedAgent::add_worker makes the others known.
  return std::make_shared<native::TensorPipeAgent>(
      addresses, inner_name(setup.id), static_cast<native::worker_id_t>(setup.id),
      /*worldSize=*/0, options, std::unordered_map<std::string, native::DeviceMap>(),
      std::vector<c10::Device>(), std::move(callback));
}

}  // namespace lockstep::rpc::detail
