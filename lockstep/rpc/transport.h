#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <string>

#include "lockstep/comm/store.h"

namespace torch::distributed::rpc {
class RequestCallback;
class RpcAgent;
}  // namespace torch::distributed::rpc

namespace lockstep::rpc::detail {

/// What carries messages between workers. LibTorch's references and autograd send theirs by its
/// agent, and so do our calls. It does not know what is in them.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual const std::shared_ptr<torch::distributed::rpc::RpcAgent>& agent() const = 0;
  /// Meets the other workers and begins to serve. Throws when they do not come in time.
  virtual void start() = 0;
  /// Ends all threads and connections. What is pending fails.
  virtual void stop() = 0;
};

struct TransportSetup {
  Store store;  ///< For the transport alone.
  std::string name;
  int rank = 0, size = 1;
  int threads = 16;
  std::chrono::milliseconds timeout{};
  bool one_host = true;
  std::unique_ptr<torch::distributed::rpc::RequestCallback> callback;
};

/// LibTorch's TensorPipe: over shared memory between workers of a host, else over TCP.
std::unique_ptr<Transport> make_tensorpipe_transport(TransportSetup setup);

}  // namespace lockstep::rpc::detail
