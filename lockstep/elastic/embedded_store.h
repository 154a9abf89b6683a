#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "lockstep/elastic/gateway.h"

namespace lockstep::elastic {

/// What a server says to a request: an HTTP status and one line of JSON.
struct Answer {
  int status = 200;
  std::string body;
};

/// The records, leases and latest changes of an embedded registry, which are in memory alone. It
/// speaks the part of etcd's protocol that our client uses, and refuses the rest. Any thread may
/// call it. It throws nothing for what is in a request.
class EmbeddedStore {
 public:
  using Clock = std::chrono::steady_clock;

  /// `history`: the number of changes that a watch can go back. `now`: for tests.
  explicit EmbeddedStore(size_t history, std::function<Clock::time_point()> now = Clock::now);

  /// Carries out a request other than a watch. Does not block.
  Answer handle(const std::string& path, const std::string& body);

  /// A stream of changes. One thread at a time uses it.
  class Watcher {
    friend class EmbeddedStore;
    struct Range {
      std::string id, key, end;
      int64_t next = 0;  ///< The first revision that was not yet looked at.
    };
    std::vector<Range> ranges_;
    std::vector<std::string> lines_;  ///< Not yet handed out.
  };
  /// `body`: lines of JSON, a "create_request" in each. An Answer where it is none.
  std::variant<Watcher, Answer> watch(const std::string& body);
  /// What there is to say on the stream; waits for it for at most `timeout`, or until `close`.
  std::vector<std::string> next_lines(Watcher& watcher, std::chrono::milliseconds timeout);

  /// Ends leases whose time is over. Call it at the time that it gave, or before. Where it is
  /// called more than 3 s late, this process stood still: the leases get that time back, as nobody
  /// could keep them.
  Clock::time_point expire_leases();
  /// Ends all waits, present and future ones.
  void close();

 private:
  struct Lease {
    std::chrono::seconds ttl{};
    Clock::time_point end;
  };
  struct Event {
    int64_t revision = 0;
    std::string key;
    std::optional<Record> record;  ///< None: it was erased.
  };
  using Handler = Json (EmbeddedStore::*)(const Json&);

  static Handler handler_of(const std::string& path);
  Json range(const Json& request);
  Json put(const Json& request);
  Json transact(const Json& request);
  Json grant(const Json& request);
  Json keep(const Json& request);
  Json revoke(const Json& request);

  Json operation(const Json& request);
  bool holds(const Json& compare) const;
  Json header() const;
  void write(Record record);
  void erase_records_of(int64_t lease);
  void remember(Event event);
  bool add_lines(Watcher& watcher);
  Clock::time_point expire();

  const size_t history_;
  const std::function<Clock::time_point()> now_;
  const std::string cluster_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool closed_ = false;
  int64_t revision_ = 1;
  int64_t compacted_ = 0;  ///< The last revision of which changes may be forgotten.
  std::map<std::string, Record> records_;
  std::map<int64_t, Lease> leases_;
  std::deque<Event> events_;
  Clock::time_point expired_at_;
};

}  // namespace lockstep::elastic
