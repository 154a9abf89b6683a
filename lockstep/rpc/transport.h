#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/store.h"
#include "lockstep/rpc/fast_link.h"
#include "lockstep/rpc/rpc.h"

namespace torch::distributed::rpc {
class RequestCallback;
class TensorPipeAgent;
}  // namespace torch::distributed::rpc

namespace lockstep::rpc::detail {

/// What carries messages between workers.
enum class Carrier {
  polled_memory,  ///< Of one host, which each worker looks at without sleeping.
  loopback,       ///< TCP within one host.
  network,        ///< TCP.
};

/// What a worker is made of.
struct WorkerSetup {
  Options options;
  Store store;
  std::string address;  ///< The group's, for `join`.
  std::string name;
  int id = 0;                      ///< The rank, for those that start together.
  std::vector<std::string> names;  ///< Theirs, by rank. None: this worker joins them.
  std::string job;                 ///< Of this job alone.
  Carrier carrier = Carrier::network;
  std::string host;                ///< The address of this host's at which it listens over TCP.
  std::shared_ptr<FastLink> link;  ///< Of the ranks; null: there is none.
};

/// LibTorch's TensorPipe. It knows a worker by `inner_name`, and its own and others' addresses by
/// `address_key` in `addresses`.
std::shared_ptr<torch::distributed::rpc::TensorPipeAgent> make_tensorpipe_agent(
    const WorkerSetup& setup, std::unique_ptr<torch::distributed::rpc::RequestCallback> callback,
    const c10::intrusive_ptr<c10d::Store>& addresses);

inline std::string inner_name(int id) {
  return std::to_string(id);
}
inline std::string address_key(int id) {
  return "addrs/" + inner_name(id);
}

}  // namespace lockstep::rpc::detail
