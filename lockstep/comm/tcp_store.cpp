#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/base/arrival.h"
#include "lockstep/base/duration.h"
#include "lockstep/base/error.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/socket.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/checks/check_context.h"
#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/comm/checks/native_log.h"
#include "lockstep/comm/native_store.h"
#include "lockstep/comm/store.h"
#include "lockstep/comm/store_host.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// The client holds its connection for as long as the server lets it wait. A wait of one thread
/// would keep another from telling what a third process waits for. So this one asks again and
/// again, and the connection is free between two questions.
class SharedTcpStore final : public c10d::TCPStore {
 public:
  SharedTcpStore(const std::string& host, const c10d::TCPStoreOptions& options)
      : TCPStore(host, options) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    c10d::TCPStoreOptions options;
    options.port = getPort();
    options.waitWorkers = false;
    options.useLibUV = isLibUvBackend();
    options.timeout = getTimeout();
    return c10::make_intrusive<SharedTcpStore>(getHost(), options);
  }

  std::vector<uint8_t> get(const std::string& key) override {
    wait({key});
    return TCPStore::get(key);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    wait(keys);
    return TCPStore::multiGet(keys);
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    const auto deadline = Clock::now() + timeout;
    const auto here = [this](const std::vector<std::string>& asked) { return check(asked); };
    Arrival arrival(keys);
    for (PollPause pause(kLongestPause); !arrival.complete(here); pause.sleep()) {
      if (timeout == kNoTimeout || Clock::now() < deadline) continue;
      C10_THROW_ERROR(DistStoreError, "wait timeout after " + std::to_string(timeout.count()) +
                                          "ms, keys: " + join(keys, ", "));
    }
  }

 private:
  static constexpr milliseconds kLongestPause{20};
};

Store make_store(const std::string& host, const c10d::TCPStoreOptions& options) {
  // Its log asks for the peer's name, and warns where nobody knows it.
  const QuietNativeLog quiet;
  try {
    return wrap_store(c10::make_intrusive<SharedTcpStore>(host, options));
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
  return make_store(host, options);
}

Store connect_store(const TcpStoreOptions& wanted) {
  const auto deadline = Clock::now() + wanted.timeout;
  wait_until_listening(wanted.host, wanted.port, wanted.timeout);
  c10d::TCPStoreOptions options;
  options.port = wanted.port;
  options.waitWorkers = wanted.world_size > 0;
  if (wanted.world_size > 0) options.numWorkers = static_cast<size_t>(wanted.world_size);
  options.timeout = std::max(milliseconds(1000), time_left(deadline));
  Store store = make_store(wanted.host, options);
  store.set_timeout(wanted.timeout);
  limit_silence(wanted.port, wanted.timeout);
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

std::shared_ptr<void> host_store(int listen_fd) {
  // The host's own connection is never used; a minute is for the handshake with itself.
  return listen_store(UniqueFd(listen_fd), milliseconds(60'000)).native();
}

}  // namespace lockstep
