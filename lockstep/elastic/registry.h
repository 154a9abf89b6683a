#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep::elastic {

/// A request to the registry, or a watch, failed for good.
class RegistryError : public Error {
 public:
  enum class Kind {
    /// Until the request's time-out each server was gone, silent or not able to serve. It may pass.
    unreachable,
    /// The servers refuse us: user, password, token, certificate, a permission or the request. A
    /// server that does not prove that it knows the token, or is no etcd of version 3, counts as
    /// one.
    refused,
  };
  RegistryError(Kind kind, const std::string& message, const std::string& hint = {})
      : Error(message, hint), kind_(kind) {}
  Kind kind() const noexcept { return kind_; }

 private:
  Kind kind_;
};

/// An entry of the registry.
struct Record {
  std::string key;
  std::string value;
  int64_t revision = 0;  ///< The registry's revision at which it was last written. They count up.
  int64_t lease = 0;     ///< It is erased when this lease ends; 0: never.
  bool operator==(const Record&) const = default;
};

/// One request. Which fields count depends on its kind.
struct Request {
  enum class Kind {
    list,          ///< All records whose keys begin with `key`, sorted by key.
    put,           ///< Writes `value` under `key`, bound to `lease`.
    grant_lease,   ///< A new lease of `ttl`.
    keep_lease,    ///< Lets `lease` live for another whole time to live.
    revoke_lease,  ///< Ends `lease` and erases the records that are bound to it.
  };
  Kind kind{};
  std::string key{};
  std::string value{};
  /// Of a put. Compare and set: it writes only while the key's record has this revision. 0: only
  /// while there is none. Without: it writes in any case.
  std::optional<int64_t> expected{};
  int64_t lease = 0;           ///< 0: none.
  std::chrono::seconds ttl{};  ///< At least 1 s. etcd itself raises it to 2 s or more.
  /// How long it is tried. 0: as the options say.
  std::chrono::milliseconds timeout{0};
};

/// What became of a request.
struct Reply {
  enum class Outcome {
    done,
    conflict,  ///< A put with `expected`: the record is another. `records` has it, if it is there.
    lease_gone,  ///< The lease has expired or was revoked. Nothing was written.
    failed,      ///< `error` says why. A put may have been carried out all the same.
  };
  uint64_t request = 0;  ///< The number that `submit` gave.
  Outcome outcome{};
  std::vector<Record> records{};  ///< list: what is there. put: the record as it stands now.
  int64_t revision = 0;           ///< Of the whole registry, when the request was carried out.
  int64_t lease = 0;              ///< grant_lease: the new one.
  std::optional<RegistryError> error{};  ///< Where it failed.
};

/// A record that was written or erased under a watched prefix, or, with `whole`, all that is there.
struct Change {
  uint64_t watch = 0;  ///< The number that `watch` gave.
  /// `written` is all that is under the prefix; what is not in it is gone. So begins a watch, and
  /// so it goes on where the registry no longer knows what was changed meanwhile.
  bool whole = false;
  std::vector<Record> written{};
  std::vector<std::string> erased{};  ///< Keys.
  /// The registry's. It never goes back, but where the registry is another one (an embedded server
  /// that was started again): then `whole` is set.
  int64_t revision = 0;
  /// The watch has ended for this reason, which is never `unreachable`.
  std::optional<RegistryError> error{};
};

using RegistryEvent = std::variant<Reply, Change>;

/// A key-value registry that all hosts of a job share, with leases and watches.
///
/// Requests and watches are carried out by a thread of its own. Replies and changes come as events
/// in one queue, which one thread reads. `submit`, `watch` and `unwatch` may be called by any
/// thread, take a short lock and never block for the network.
///
/// Order: requests run side by side; who wants one after another waits for the first one's reply.
/// Changes of a watch come in the order of their revisions, and none is missed or comes twice; only
/// where `whole` is set may earlier records of a key have been passed over.
///
/// Failures that may pass (a server is gone, silent, or has no leader) are tried again at all
/// servers until the request's time-out. Then its reply says `failed`. A watch is tried again for
/// ever. Nothing here ends the process or throws for such a failure.
///
/// A put that was tried again may be carried out by a slow server later than the next put of its
/// key. One with `expected` cannot: use it for all that must not go back. As its first try may have
/// been carried out, it counts as done also where the record already has its value and lease.
class Registry {
 public:
  virtual ~Registry() = default;
  /// Its number, which the reply has. Never 0.
  virtual uint64_t submit(Request request) = 0;
  /// Watches all keys that begin with `prefix`. The number that its changes have. Never 0.
  virtual uint64_t watch(const std::string& prefix) = 0;
  /// Ends a watch. Changes that are already in the queue still come.
  virtual void unwatch(uint64_t watch) = 0;
  /// The next event; waits for it for at most `timeout`. None when none comes.
  virtual std::optional<RegistryEvent> next_event(std::chrono::milliseconds timeout) = 0;
  /// Readable (poll) while events wait. Only for waiting; stays this object's.
  virtual int descriptor() const = 0;
};

}  // namespace lockstep::elastic
