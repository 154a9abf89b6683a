#pragma once

#include <chrono>
#include <exception>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

namespace lockstep {

/// c10d's TCP store, none of whose requests waits for ever. c10d's own waits for an answer without
/// a limit, so a store whose process is stopped would hold up every rank. After such a silence the
/// connection is of no more use: the answer that was missed could be taken for the next one. Then
/// all later requests fail at once.
///
/// c10d's client also holds its connection for as long as the server lets it wait. A wait of one
/// thread would keep another from telling what a third process waits for. This one asks again and
/// again, and the connection is free between two questions. Any thread may call.
///
/// c10d's server closes the connection of whoever sends too much. That is a UsageError here.
class LimitedTcpStore final : public c10d::TCPStore {
 public:
  using Ptr = c10::intrusive_ptr<LimitedTcpStore>;
  /// What c10d's server takes in a request: keys, bytes of a key with its prefixes, of a value.
  static constexpr size_t kMostKeys = 128 << 10, kLongestKey = (8 << 10) - 1;
  static constexpr size_t kLongestValue = 8 << 20;
  /// The store's server, or a connection to one, which is made within `options.timeout`. `limit`:
  /// how long an answer may take, 1 s to 1 h. Throws c10d's errors, also where the other side
  /// accepts the connection and says nothing.
  static Ptr make(const std::string& host, const c10d::TCPStoreOptions& options,
                  std::chrono::milliseconds limit);
  /// For `make`.
  LimitedTcpStore(const std::string& host, const c10d::TCPStoreOptions& options,
                  std::chrono::milliseconds limit)
      : TCPStore(host, options), serves_(options.isServer), limit_(limit) {}

  /// A connection of its own.
  c10::intrusive_ptr<c10d::Store> clone() override;
  bool serves() const { return serves_; }
  std::chrono::milliseconds limit() const { return limit_; }

  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  std::vector<std::string> listKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;

 private:
  template <class Request>
  auto limited(Request request) -> decltype(request());

  const bool serves_;
  const std::chrono::milliseconds limit_;
  std::mutex one_request_;   ///< Held during a request; guards the next one.
  std::exception_ptr lost_;  ///< Why the connection is of no more use.
};

/// The TCP store of which this is one, or a prefix. Null for another kind. Lives as long as it.
const c10d::TCPStore* tcp_store_of(const c10::intrusive_ptr<c10d::Store>& store);

/// The same keys over a store none of whose requests takes longer than `timeout`. That is `store`
/// itself unless it is a TCP store that is plain, has a longer limit, or serves others, who must
/// not lose it later than its owner lets it go. For those it makes a connection within `timeout`.
/// Throws c10d's errors.
c10::intrusive_ptr<c10d::Store> limited_store(const c10::intrusive_ptr<c10d::Store>& store,
                                              std::chrono::milliseconds timeout);

}  // namespace lockstep
