#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/base/duration.h"
#include "lockstep/base/error.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/socket.h"
#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/comm/checks/limited_tcp_store.h"
#include "lockstep/comm/checks/native_log.h"
#include "lockstep/comm/native_store.h"
#include "lockstep/comm/store.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

Store make_store(const std::string& host, const c10d::TCPStoreOptions& options,
                 milliseconds limit) {
  // Its log asks for the peer's name, and warns where nobody knows it.
  const QuietNativeLog quiet;
  try {
    return wrap_store(LimitedTcpStore::make(host, options, limit));
  } catch (const std::exception&) {
    throw CommError("store at " + host + ":" + std::to_string(options.port) + ": " +
                    failure_text(std::current_exception()));
  }
}

// The store's own process connects to it as well.
Store listen_store(UniqueFd fd, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = bound_port(fd.get());
  options.isServer = true;
  options.waitWorkers = false;
  options.timeout = timeout;
  const std::string host = bound_host(fd.get());
  options.masterListenFd = fd.release();
  return make_store(host, options, timeout);
}

Store connect_store(const TcpStoreOptions& wanted) {
  const auto deadline = Clock::now() + wanted.timeout;
  wait_until_listening(wanted.host, wanted.port, wanted.timeout);
  c10d::TCPStoreOptions options;
  options.port = wanted.port;
  options.waitWorkers = wanted.world_size > 0;
  if (wanted.world_size > 0) options.numWorkers = static_cast<size_t>(wanted.world_size);
  options.timeout = std::max(milliseconds(1000), time_left(deadline));
  Store store = make_store(wanted.host, options, wanted.timeout);
  store.set_timeout(wanted.timeout);
  return store;
}

}  // namespace

Store tcp_store(const TcpStoreOptions& options) {
  check_timeout("store at " + options.host, options.timeout);
  if (!options.is_listener) {
    if (options.port == 0) throw UsageError("store at " + options.host + ": the port is missing");
    return connect_store(options);
  }
  UniqueFd fd(options.listen_fd);
  if (!fd) fd = listen_on(options.all_interfaces ? "" : options.host, options.port);
  return listen_store(std::move(fd), options.timeout);
}

uint16_t tcp_store_port(const Store& store) {
  const auto* tcp = store ? tcp_store_of(native_store(store)) : nullptr;
  if (!tcp) throw UsageError("tcp_store_port: not a TCP store");
  return tcp->getPort();
}

std::optional<std::pair<std::string, uint16_t>> tcp_endpoint(const Store& store) {
  const auto* tcp = store ? tcp_store_of(native_store(store)) : nullptr;
  if (!tcp) return std::nullopt;
  return std::pair(tcp->getHost(), static_cast<uint16_t>(tcp->getPort()));
}

}  // namespace lockstep
