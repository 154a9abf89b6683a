#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <string>

namespace torch::distributed::rpc {
class RequestCallback;
class RpcAgent;
}  // namespace torch::distributed::rpc

namespace lockstep::rpc::detail {

struct Guard;

/// What carries messages between workers, and looks whether they can be read. LibTorch's references
/// and autograd send theirs by its agent, and so do our calls.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual const std::shared_ptr<torch::distributed::rpc::RpcAgent>& agent() const = 0;
  /// Begins to serve.
  virtual void start() = 0;
  /// Where others find it, once it has been started.
  virtual std::string address() = 0;
  /// Makes another worker known. Its number is no other one's, now or before.
  virtual void add_worker(int id, const std::string& name, const std::string& address) = 0;
  /// Ends all threads and connections. What is pending fails.
  virtual void stop() = 0;
};

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

/// LibTorch's TensorPipe.
std::unique_ptr<Transport> make_tensorpipe_transport(TransportSetup setup);

}  // namespace lockstep::rpc::detail
