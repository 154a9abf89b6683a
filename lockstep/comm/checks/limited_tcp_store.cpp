#include "lockstep/comm/checks/limited_tcp_store.h"

#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/base/arrival.h"
#include "lockstep/base/error.h"
#include "lockstep/base/in_time.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/socket.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/comm/checks/native_log.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kLongestPause{20};
/// c10d's own time-out says more than the one around it.
constexpr milliseconds kSlack{500};

[[noreturn]] void throw_silent(const std::string& host, int port, milliseconds limit) {
  C10_THROW_ERROR(DistNetworkError, "connection timed out: the store at " + host + ":" +
                                        std::to_string(port) + " gave no answer within " +
                                        seconds_text(limit) +
                                        "; its process is stopped, or its host was cut off");
}

void expect_at_most(size_t most, size_t size, const std::string& what) {
  if (size <= most) return;
  throw UsageError("store: " + what + " of " + std::to_string(size) + " bytes",
                   "c10d's store takes " + std::to_string(most) + " at most");
}

void expect_keys(const std::vector<std::string>& keys) {
  constexpr size_t kMost = LimitedTcpStore::kMostKeys;
  if (keys.size() > kMost) {
    throw UsageError("store: a request with " + std::to_string(keys.size()) + " keys",
                     "c10d's store takes " + std::to_string(kMost) + " at most: ask in parts");
  }
  for (const auto& key : keys) expect_at_most(LimitedTcpStore::kLongestKey, key.size(), "a key");
}

void expect_value(const std::string& key, const std::vector<uint8_t>& value) {
  expect_at_most(LimitedTcpStore::kLongestValue, value.size(), "a value of key '" + key + "'");
}

/// PrefixStore tells its prefix to its heirs only.
struct PrefixReader : c10d::PrefixStore {
  static const std::string& prefix(const c10d::PrefixStore& store) {
    return store.*(&PrefixReader::prefix_);
  }
};

/// A client of the same server, which logs no attempt and waits for no answer for ever.
LimitedTcpStore::Ptr another_client(const c10d::TCPStore& store, milliseconds timeout,
                                    milliseconds limit) {
  c10d::TCPStoreOptions options;
  options.port = store.getPort();
  options.waitWorkers = false;
  options.useLibUV = store.isLibUvBackend();
  options.timeout = timeout;
  auto client = LimitedTcpStore::make(store.getHost(), options, limit);
  client->setTimeout(store.getTimeout());
  return client;
}

}  // namespace

LimitedTcpStore::Ptr LimitedTcpStore::make(const std::string& host,
                                           const c10d::TCPStoreOptions& options,
                                           milliseconds limit) {
  const auto connect = [host, options, limit] {
    const QuietNativeLog quiet;
    return c10::make_intrusive<LimitedTcpStore>(host, options, limit);
  };
  // A server's own connection is to this process.
  if (options.isServer) return connect();
  const auto store = in_time(connect, options.timeout + kSlack);
  if (!store) throw_silent(host, options.port, options.timeout);
  limit_silence(options.port, limit);
  return *store;
}

/// One request at a time: none is begun on a connection on which another one was given up.
template <class Request>
auto LimitedTcpStore::limited(Request request) -> decltype(request()) {
  const std::lock_guard lock(one_request_);
  if (lost_) std::rethrow_exception(lost_);
  const QuietNativeLog quiet;
  try {
    try {
      return request();
    } catch (const c10::DistNetworkError&) {
      if (failure_kind(std::current_exception()) != FailureKind::timeout) throw;
      throw_silent(getHost(), getPort(), limit_);
    }
  } catch (const c10::DistNetworkError&) {
    lost_ = std::current_exception();
    throw;
  }
}

c10::intrusive_ptr<c10d::Store> LimitedTcpStore::clone() {
  return another_client(*this, getTimeout(), limit_);
}

void LimitedTcpStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  expect_keys({key});
  expect_value(key, value);
  limited([&] { TCPStore::set(key, value); });
}

std::vector<uint8_t> LimitedTcpStore::compareSet(const std::string& key,
                                                 const std::vector<uint8_t>& expected,
                                                 const std::vector<uint8_t>& desired) {
  expect_keys({key});
  for (const auto* value : {&expected, &desired}) expect_value(key, *value);
  return limited([&] { return TCPStore::compareSet(key, expected, desired); });
}

std::vector<uint8_t> LimitedTcpStore::get(const std::string& key) {
  wait({key});
  return limited([&] { return TCPStore::get(key); });
}

int64_t LimitedTcpStore::add(const std::string& key, int64_t value) {
  expect_keys({key});
  return limited([&] { return TCPStore::add(key, value); });
}

bool LimitedTcpStore::deleteKey(const std::string& key) {
  expect_keys({key});
  return limited([&] { return TCPStore::deleteKey(key); });
}

bool LimitedTcpStore::check(const std::vector<std::string>& keys) {
  expect_keys(keys);
  return limited([&] { return TCPStore::check(keys); });
}

int64_t LimitedTcpStore::getNumKeys() {
  return limited([&] { return TCPStore::getNumKeys(); });
}

std::vector<std::string> LimitedTcpStore::listKeys() {
  return limited([&] { return TCPStore::listKeys(); });
}

void LimitedTcpStore::wait(const std::vector<std::string>& keys) {
  wait(keys, getTimeout());
}

void LimitedTcpStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  expect_keys(keys);
  const auto deadline = Clock::now() + timeout;
  const auto here = [this](const std::vector<std::string>& asked) { return check(asked); };
  Arrival arrival(keys);
  for (PollPause pause(kLongestPause); !arrival.complete(here); pause.sleep()) {
    if (timeout == kNoTimeout || Clock::now() < deadline) continue;
    C10_THROW_ERROR(DistStoreError, "wait timeout after " + std::to_string(timeout.count()) +
                                        "ms, keys: " + join(keys, ", "));
  }
}

std::vector<std::vector<uint8_t>> LimitedTcpStore::multiGet(const std::vector<std::string>& keys) {
  wait(keys);
  return limited([&] { return TCPStore::multiGet(keys); });
}

const c10d::TCPStore* tcp_store_of(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  const auto bottom = prefixed ? prefixed->getUnderlyingNonPrefixStore() : store;
  return dynamic_cast<const c10d::TCPStore*>(bottom.get());
}

c10::intrusive_ptr<c10d::Store> limited_store(const c10::intrusive_ptr<c10d::Store>& store,
                                              milliseconds timeout) {
  const auto* tcp = tcp_store_of(store);
  const auto* limited = dynamic_cast<const LimitedTcpStore*>(tcp);
  if (!tcp || (limited && !limited->serves() && limited->limit() <= timeout)) return store;
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get()))
    return c10::make_intrusive<c10d::PrefixStore>(
        PrefixReader::prefix(*prefixed), limited_store(prefixed->getUnderlyingStore(), timeout));
  return another_client(*tcp, timeout, timeout);
}

}  // namespace lockstep
