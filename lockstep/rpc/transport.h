#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <string>

namespace c10d {
class Store;
}
namespace torch::distributed::rpc {
class RequestCallback;
class TensorPipeAgent;
}  // namespace torch::distributed::rpc

namespace lockstep::rpc::detail {

struct Guard;

/// What carries messages between workers.
enum class Carrier {
  polled_memory,  ///< Of one host, which each worker looks at without sleeping.
  loopback,       ///< TCP within one host.
  network,        ///< TCP.
};

struct TransportSetup {
  std::string name;
  int id = 0;
  int threads = 16;
  std::chrono::milliseconds timeout{};
  Carrier carrier = Carrier::network;
  std::string host;  ///< The address of this host's at which it listens over TCP.
  std::shared_ptr<Guard> guard;
  std::unique_ptr<torch::distributed::rpc::RequestCallback> callback;
};

/// LibTorch's TensorPipe. It knows a worker by `inner_name`, and its own and others' addresses by
/// `address_key` in `addresses`.
std::shared_ptr<torch::distributed::rpc::TensorPipeAgent> make_tensorpipe_agent(
    TransportSetup& setup, const c10::intrusive_ptr<c10d::Store>& addresses);

inline std::string inner_name(int id) {
  return std::to_string(id);
}
inline std::string address_key(int id) {
  return "addrs/" + inner_name(id);
}

}  // namespace lockstep::rpc::detail
