#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace c10d {
class Store;
}

namespace lockstep {

/// A key-value store that all ranks share: how they meet and agree. A handle, whose copies share
/// the store. Any thread may call, also while another one waits. A TCP store carries one request at
/// a time. `clone` gives a connection of its own.
///
/// Every waiting call gives up after the store's time-out with a TimeoutError that names the keys.
/// A store whose process is gone gives a PeerLostError.
///
/// A TCP store takes keys of 8191 bytes with their prefixes, 131,072 of them in a request, and 8
/// MiB in `compare_set`. More is a UsageError. A value of `set` that is longer is stored in parts,
/// which Python does not put together. They go with `delete_key`. Those of a value that was set
/// again stay as long as the store.
class Store {
 public:
  Store() = default;
  /// Wraps a c10d store (shared ownership by intrusive count, kept behind this interface).
  explicit Store(std::shared_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value);
  /// Waits until the key is set. Throws TimeoutError naming the key.
  std::string get(const std::string& key);
  /// The values of all keys, in one request where the store can. Waits until all are set.
  std::vector<std::string> multi_get(const std::vector<std::string>& keys);
  /// Adds to the number under the key (0 when unset) and returns the sum. Atomic.
  int64_t add(const std::string& key, int64_t amount);
  /// Sets the key to `desired` if its value is `expected`. An empty `expected` also matches an
  /// unset key. Returns the value that is then stored: `desired` on success, else what is there.
  /// For an unset key and an `expected` that is not empty it stores nothing and returns
  /// `expected`. Atomic.
  std::string compare_set(const std::string& key, const std::string& expected,
                          const std::string& desired);
  void wait(const std::vector<std::string>& keys,
            std::optional<std::chrono::milliseconds> timeout = std::nullopt);
  /// True when all keys are set now.
  bool check(const std::vector<std::string>& keys);
  /// True when the key was there. A file store cannot tell and always says so.
  bool delete_key(const std::string& key);
  /// How many keys there are, those of c10d's own bookkeeping included.
  int64_t num_keys();
  std::chrono::milliseconds timeout() const;
  void set_timeout(std::chrono::milliseconds timeout);
  /// The same store over a connection of its own.
  Store clone() const;

  explicit operator bool() const { return store_ != nullptr; }
  /// The c10d store, for code that speaks c10d.
  const std::shared_ptr<c10d::Store>& native() const { return store_; }

 private:
  std::shared_ptr<c10d::Store> store_;
};

struct TcpStoreOptions {
  /// The address of the process that listens. "0.0.0.0" there: on all interfaces, for several
  /// hosts.
  std::string host = "127.0.0.1";
  uint16_t port = 0;         ///< 0: any free port, for the listener only; see `tcp_store_port`.
  bool is_listener = false;  ///< True in the one process that holds the store.
  int listen_fd = -1;  ///< A bound and listening socket to take over: no race for a free port.
  /// How many processes will connect, for Python's rank 0, whose store waits until that many have
  /// come; 0: nobody counts. The listener here never waits.
  int world_size = 0;
  /// Give up connecting, and by default waiting, after this long. Interactive work wants to hear of
  /// a mistyped address soon. torchrun's own default is 10 minutes for the same wait.
  std::chrono::milliseconds timeout{60'000};
};

/// Throws TimeoutError or CommError naming host and port: does not resolve, refuses, port taken.
Store tcp_store(const TcpStoreOptions& options);
/// The port that a store made by `tcp_store` (or a prefix of one) listens on or is connected to.
/// Throws UsageError for any other store.
uint16_t tcp_store_port(const Store& store);
/// Host and port of a store made by `tcp_store` (or a prefix of one); none for any other store.
std::optional<std::pair<std::string, uint16_t>> tcp_endpoint(const Store& store);
/// A store in a file that all ranks can reach, on one host or by a network file system that locks.
/// `world_size` of -1: any number of users; else the last of that many removes the file. Where
/// several leave at once it may stay.
Store file_store(const std::filesystem::path& path, int world_size = -1);
/// A store within this process, for its threads.
Store hash_store();
/// A view of `store` in which every key is prefixed by `prefix` + "/".
Store prefix_store(const std::string& prefix, const Store& store);

}  // namespace lockstep
