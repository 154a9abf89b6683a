#include "lockstep/comm/store.h"

#include <filesystem>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/base/duration.h"
#include "lockstep/base/error.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/socket.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/comm/checks/limited_tcp_store.h"
#include "lockstep/comm/checks/native_log.h"
#include "lockstep/comm/native_store.h"

namespace lockstep {
namespace {

std::vector<uint8_t> bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
}

std::string text_of(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

std::string keys_text(const std::vector<std::string>& keys) {
  constexpr size_t kShown = 8;
  if (keys.size() <= kShown) return "'" + join(keys, "', '") + "'";
  const std::vector<std::string> shown(keys.begin(), keys.begin() + kShown);
  return "'" + join(shown, "', '") + "' and " + std::to_string(keys.size() - kShown) + " more";
}

[[noreturn]] void throw_ours(const char* operation, const std::vector<std::string>& keys,
                             const std::exception_ptr& error, std::chrono::milliseconds timeout) {
  const std::string what = std::string("store: ") + operation + " of " + keys_text(keys);
  const FailureKind kind = failure_kind(error);
  if (kind == FailureKind::ours) std::rethrow_exception(error);
  if (kind == FailureKind::silence) {
    throw TimeoutError(what + ": " + failure_text(error),
                       "rank 0, or the launcher, holds the store");
  }
  if (kind == FailureKind::timeout) {
    throw TimeoutError(what + ": nobody set it within " +
                       human_seconds(static_cast<double>(timeout.count()) / 1000));
  }
  if (kind == FailureKind::connection) {
    throw PeerLostError(
        what + ": lost the process that holds the store (" + failure_text(error) + ")",
        std::string(kPeerLostHint) + " (rank 0, or the launcher, holds it)");
  }
  throw CommError(what + ": " + failure_text(error));
}

// Runs a call on the c10d store and turns its exceptions into ours.
template <class F>
auto guarded(const std::shared_ptr<c10d::Store>& store, const char* operation,
             const std::vector<std::string>& keys, std::optional<std::chrono::milliseconds> timeout,
             F&& call) {
  if (!store) throw UsageError(std::string("store: ") + operation + " on an empty handle");
  const QuietNativeLog quiet;
  try {
    return call(*store);
  } catch (const std::exception&) {
    throw_ours(operation, keys, std::current_exception(), timeout.value_or(store->getTimeout()));
  }
}

/// Begins what stands under the key of a value that is stored in parts. Their common key follows.
constexpr std::string_view kInParts("\0lockstep/parts/", 16);

/// The keys of a value's parts; none where it is stored as it is.
std::vector<std::string> keys_of_parts(const std::string& value) {
  std::vector<std::string> keys;
  if (!value.starts_with(kInParts)) return keys;
  const size_t slash = value.find('/', kInParts.size());
  const int64_t count =
      parse_int(value.substr(kInParts.size(), slash - kInParts.size())).value_or(0);
  for (int64_t i = 0; i < count; ++i)
    keys.push_back(value.substr(slash + 1) + "/" + std::to_string(i));
  return keys;
}

/// The value that c10d gave for a key.
std::string whole(c10d::Store& store, const std::vector<uint8_t>& bytes) {
  const std::string value = text_of(bytes);
  const auto parts = keys_of_parts(value);
  if (parts.empty()) return value;
  std::string all;
  for (const auto& key : parts) all += text_of(store.get(key));
  return all;
}

bool takes_whole(const Store& store, size_t size) {
  return size <= LimitedTcpStore::kLongestValue || !tcp_store_of(native_store(store));
}

std::string set_parts(c10d::Store& store, const std::string& key, const std::string& value) {
  constexpr size_t kPart = LimitedTcpStore::kLongestValue;
  const std::string common = key + "/" + random_hex(16);
  size_t count = 0;
  for (; count * kPart < value.size(); ++count)
    store.set(common + "/" + std::to_string(count), bytes_of(value.substr(count * kPart, kPart)));
  return std::string(kInParts) + std::to_string(count) + "/" + common;
}

Store make_store(const std::string& host, const c10d::TCPStoreOptions& options,
                 std::chrono::milliseconds limit) {
  // Its log asks for the peer's name, and warns where nobody knows it.
  const QuietNativeLog quiet;
  try {
    return wrap_store(LimitedTcpStore::make(host, options, limit));
  } catch (const std::exception&) {
    throw CommError("store at " + host + ":" + std::to_string(options.port) + ": " +
                    failure_text(std::current_exception()) +
                    (options.isServer ? "" : "; " + what_answers(host, options.port)));
  }
}

// The store's own process connects to it as well.
Store listen_store(UniqueFd fd, std::chrono::milliseconds timeout) {
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
  const auto deadline = std::chrono::steady_clock::now() + wanted.timeout;
  connect_to(wanted.host, wanted.port, wanted.timeout);
  c10d::TCPStoreOptions options;
  options.port = wanted.port;
  options.waitWorkers = wanted.world_size > 0;
  if (wanted.world_size > 0) options.numWorkers = static_cast<size_t>(wanted.world_size);
  options.timeout = std::max(std::chrono::milliseconds(1000), time_left(deadline));
  Store store = make_store(wanted.host, options, wanted.timeout);
  store.set_timeout(wanted.timeout);
  return store;
}

}  // namespace

void Store::set(const std::string& key, const std::string& value) {
  guarded(store_, "set", {key}, {}, [&](c10d::Store& s) {
    const bool fits = takes_whole(*this, value.size());
    s.set(key, bytes_of(fits ? value : set_parts(s, key, value)));
  });
}

std::string Store::get(const std::string& key) {
  return guarded(store_, "get", {key}, {}, [&](c10d::Store& s) { return whole(s, s.get(key)); });
}

std::vector<std::string> Store::multi_get(const std::vector<std::string>& keys) {
  return guarded(store_, "multi_get", keys, {}, [&](c10d::Store& s) {
    std::vector<std::string> values;
    values.reserve(keys.size());
    if (keys.size() > 1 && s.hasExtendedApi()) {
      for (const auto& value : s.multiGet(keys)) values.push_back(whole(s, value));
    } else {
      for (const auto& key : keys) values.push_back(whole(s, s.get(key)));
    }
    return values;
  });
}

int64_t Store::add(const std::string& key, int64_t amount) {
  return guarded(store_, "add", {key}, {}, [&](c10d::Store& s) { return s.add(key, amount); });
}

std::string Store::compare_set(const std::string& key, const std::string& expected,
                               const std::string& desired) {
  return guarded(store_, "compare_set", {key}, {}, [&](c10d::Store& s) {
    return whole(s, s.compareSet(key, bytes_of(expected), bytes_of(desired)));
  });
}

void Store::wait(const std::vector<std::string>& keys,
                 std::optional<std::chrono::milliseconds> timeout) {
  if (timeout) check_timeout("store: wait", *timeout);
  guarded(store_, "wait", keys, timeout,
          [&](c10d::Store& s) { s.wait(keys, timeout.value_or(s.getTimeout())); });
}

bool Store::check(const std::vector<std::string>& keys) {
  return guarded(store_, "check", keys, {}, [&](c10d::Store& s) { return s.check(keys); });
}

bool Store::delete_key(const std::string& key) {
  return guarded(store_, "delete_key", {key}, {}, [&](c10d::Store& s) {
    if (!tcp_store_of(native_store(*this))) return s.deleteKey(key);
    // Sets nothing, as no value is the mark alone, and does not wait for a key that is not there.
    const auto value = s.compareSet(key, bytes_of(std::string(kInParts)), {});
    for (const auto& part : keys_of_parts(text_of(value))) s.deleteKey(part);
    return s.deleteKey(key);
  });
}

int64_t Store::num_keys() {
  return guarded(store_, "num_keys", {}, {}, [](c10d::Store& s) { return s.getNumKeys(); });
}

std::chrono::milliseconds Store::timeout() const {
  return guarded(store_, "timeout", {}, {}, [](c10d::Store& s) { return s.getTimeout(); });
}

void Store::set_timeout(std::chrono::milliseconds timeout) {
  check_timeout("store: set_timeout", timeout);
  guarded(store_, "set_timeout", {}, {}, [&](c10d::Store& s) { s.setTimeout(timeout); });
}

Store Store::clone() const {
  return guarded(store_, "clone", {}, {}, [](c10d::Store& s) { return wrap_store(s.clone()); });
}

c10::intrusive_ptr<c10d::Store> native_store(const Store& store) {
  if (!store) throw UsageError("store: an empty handle has no c10d store");
  return c10::intrusive_ptr<c10d::Store>::unsafe_reclaim_from_nonowning(store.native().get());
}

Store wrap_store(c10::intrusive_ptr<c10d::Store> store) {
  c10d::Store* raw = store.get();
  return Store(std::shared_ptr<c10d::Store>(raw, [owner = std::move(store)](c10d::Store*) {}));
}

Store file_store(const std::filesystem::path& path, int world_size) {
  if (path.empty()) throw UsageError("file store: the path is empty");
  const auto folder = std::filesystem::absolute(path).parent_path();
  if (!std::filesystem::is_directory(folder)) {
    throw UsageError("file store '" + path.string() + "': no folder '" + folder.string() + "'",
                     "make it, or name a file in a folder that every rank can reach");
  }
  try {
    return wrap_store(c10::make_intrusive<c10d::FileStore>(path.string(), world_size));
  } catch (const std::exception& error) {
    throw CommError("file store '" + path.string() + "': " + error.what());
  }
}

Store hash_store() {
  return wrap_store(c10::make_intrusive<c10d::HashStore>());
}

Store prefix_store(const std::string& prefix, const Store& store) {
  return wrap_store(c10::make_intrusive<c10d::PrefixStore>(prefix, native_store(store)));
}

Store tcp_store(const TcpStoreOptions& options) {
  check_timeout("store at " + options.host, options.timeout);
  if (!options.is_listener) {
    if (options.port == 0) throw UsageError("store at " + options.host + ": the port is missing");
    return connect_store(options);
  }
  UniqueFd fd(options.listen_fd);
  if (!fd) fd = listen_on(options.host, options.port);
  return listen_store(std::move(fd), options.timeout);
}

uint16_t tcp_store_port(const Store& store) {
  if (const auto endpoint = tcp_endpoint(store)) return endpoint->second;
  throw UsageError("tcp_store_port: not a TCP store");
}

std::optional<std::pair<std::string, uint16_t>> tcp_endpoint(const Store& store) {
  const auto* tcp = store ? tcp_store_of(native_store(store)) : nullptr;
  if (!tcp) return std::nullopt;
  return std::pair(tcp->getHost(), static_cast<uint16_t>(tcp->getPort()));
}

}  // namespace lockstep
