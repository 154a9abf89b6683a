#include "lockstep/elastic/embedded_store.h"

#include <algorithm>
#include <random>

#include "lockstep/base/text.h"

namespace lockstep::elastic {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int64_t kLongestLease = 1'000'000;  // Seconds.
constexpr size_t kMostRanges = 64;            // Of a stream.
constexpr seconds kStoodStill{3};

/// Leaves the carrying out of a request.
struct Refusal {
  GrpcCode code;
  const char* text;
};

/// Not 0, and of so many bits that none comes twice.
int64_t random_number() {
  return static_cast<int64_t>(std::stoull(random_hex(7) + "1", nullptr, 16));
}

int http_status(GrpcCode code) {
  if (code == GrpcCode::not_found) return 404;
  return code == GrpcCode::unimplemented ? 501 : 400;
}

Answer answer_of(const Refusal& refusal) {
  const Json error = {
      {"error", refusal.text}, {"message", refusal.text}, {"code", int(refusal.code)}};
  return {http_status(refusal.code), error.dump()};
}

int64_t number(const Json& object, const char* name) {
  const auto value = int_field(object, name);
  if (!value) throw Refusal{GrpcCode::invalid_argument, "a field is no whole number"};
  return *value;
}

std::string bytes(const Json& object, const char* name) {
  auto value = bytes_field(object, name);
  if (!value) throw Refusal{GrpcCode::invalid_argument, "a field is not in base64"};
  return std::move(*value);
}

std::string key_of(const Json& object) {
  std::string key = bytes(object, "key");
  if (key.empty()) throw Refusal{GrpcCode::invalid_argument, "etcdserver: key is not provided"};
  return key;
}

/// Whether it is in etcd's range: one key, or from a key to before another, or to the last one.
bool in_range(const std::string& key, const std::string& first, const std::string& end) {
  if (end.empty()) return key == first;
  return key >= first && (end == std::string(1, '\0') || key < end);
}

}  // namespace

EmbeddedStore::EmbeddedStore(size_t history, std::function<Clock::time_point()> now)
    : history_(history),
      now_(std::move(now)),
      cluster_(std::to_string(random_number())),
      expired_at_(now_()) {}

EmbeddedStore::Handler EmbeddedStore::handler_of(const std::string& path) {
  static const std::map<std::string, Handler> handlers = {
      {"/v3/kv/range", &EmbeddedStore::range},       {"/v3/kv/put", &EmbeddedStore::put},
      {"/v3/kv/txn", &EmbeddedStore::transact},      {"/v3/lease/grant", &EmbeddedStore::grant},
      {"/v3/lease/keepalive", &EmbeddedStore::keep}, {"/v3/lease/revoke", &EmbeddedStore::revoke}};
  const auto found = handlers.find(path);
  return found == handlers.end() ? nullptr : found->second;
}

Answer EmbeddedStore::handle(const std::string& path, const std::string& body) {
  const Handler handler = handler_of(path);
  if (!handler) return answer_of({GrpcCode::unimplemented, "no such method"});
  const Json request = parse_json(body);
  if (!request.is_object()) return answer_of({GrpcCode::invalid_argument, "not a JSON object"});
  const std::lock_guard lock(mutex_);
  expire();
  try {
    Json reply = (this->*handler)(request);
    reply["header"] = header();
    if (handler == &EmbeddedStore::keep) reply = {{"result", std::move(reply)}};  // etcd's stream
    return {200, reply.dump()};
  } catch (const Refusal& refusal) {
    return answer_of(refusal);
  }
}

Json EmbeddedStore::header() const {
  return {{"cluster_id", cluster_}, {"revision", std::to_string(revision_)}};
}

Json EmbeddedStore::range(const Json& request) {
  const std::string first = key_of(request), end = bytes(request, "range_end");
  Json kvs = Json::array();
  for (auto at = records_.lower_bound(first);
       at != records_.end() && in_range(at->first, first, end); ++at) {
    kvs.push_back(json_of(at->second));
  }
  return {{"count", std::to_string(kvs.size())}, {"kvs", std::move(kvs)}};
}

Json EmbeddedStore::put(const Json& request) {
  Record record{key_of(request), bytes(request, "value"), 0, number(request, "lease")};
  if (record.lease != 0 && !leases_.contains(record.lease))
    throw Refusal{GrpcCode::not_found, "etcdserver: requested lease not found"};
  write(std::move(record));
  return Json::object();
}

bool EmbeddedStore::holds(const Json& compare) const {
  if (field(compare, "target") != "MOD" || field(compare, "result") != "EQUAL" ||
      field(compare, "range_end") != Json()) {
    throw Refusal{GrpcCode::unimplemented, "only MOD and EQUAL of one key are compared"};
  }
  const auto found = records_.find(key_of(compare));
  return number(compare, "mod_revision") == (found == records_.end() ? 0 : found->second.revision);
}

Json EmbeddedStore::operation(const Json& request) {
  if (const Json& inner = field(request, "request_put"); inner.is_object())
    return {{"response_put", put(inner)}};
  if (const Json& inner = field(request, "request_range"); inner.is_object())
    return {{"response_range", range(inner)}};
  throw Refusal{GrpcCode::unimplemented, "no such operation"};
}

Json EmbeddedStore::transact(const Json& request) {
  const Json& compares = field(request, "compare");
  const bool succeeded = std::all_of(compares.begin(), compares.end(),
                                     [this](const Json& compare) { return holds(compare); });
  const Json& operations = field(request, succeeded ? "success" : "failure");
  // More would have to be undone where one of them is refused.
  if (operations.size() > 1)
    throw Refusal{GrpcCode::unimplemented, "more than one operation in a transaction"};
  Json responses = Json::array();
  for (const Json& one : operations) responses.push_back(operation(one));
  return {{"succeeded", succeeded}, {"responses", std::move(responses)}};
}

Json EmbeddedStore::grant(const Json& request) {
  const int64_t ttl = number(request, "TTL");
  if (ttl < 1 || ttl > kLongestLease)
    throw Refusal{GrpcCode::invalid_argument, "a lease takes 1 to 1000000 seconds"};
  const int64_t id = random_number();
  leases_[id] = {seconds(ttl), now_() + seconds(ttl)};
  return {{"ID", std::to_string(id)}, {"TTL", std::to_string(ttl)}};
}

Json EmbeddedStore::keep(const Json& request) {
  const int64_t id = number(request, "ID");
  const auto found = leases_.find(id);
  if (found == leases_.end()) return {{"ID", std::to_string(id)}};
  found->second.end = now_() + found->second.ttl;
  return {{"ID", std::to_string(id)}, {"TTL", std::to_string(found->second.ttl.count())}};
}

Json EmbeddedStore::revoke(const Json& request) {
  const int64_t id = number(request, "ID");
  if (leases_.erase(id) == 0)
    throw Refusal{GrpcCode::not_found, "etcdserver: requested lease not found"};
  erase_records_of(id);
  return Json::object();
}

void EmbeddedStore::write(Record record) {
  record.revision = ++revision_;
  remember({revision_, record.key, record});
  records_[record.key] = std::move(record);
}

void EmbeddedStore::erase_records_of(int64_t lease) {
  const int64_t next = revision_ + 1;
  std::erase_if(records_, [&](const auto& entry) {
    if (entry.second.lease != lease) return false;
    revision_ = next;
    remember({next, entry.first, std::nullopt});
    return true;
  });
}

void EmbeddedStore::remember(Event event) {
  events_.push_back(std::move(event));
  while (events_.size() > history_) {
    compacted_ = events_.front().revision;
    events_.pop_front();
  }
  changed_.notify_all();
}

EmbeddedStore::Clock::time_point EmbeddedStore::expire_leases() {
  const std::lock_guard lock(mutex_);
  return expire();
}

EmbeddedStore::Clock::time_point EmbeddedStore::expire() {
  const auto now = now_();
  const auto stood_still = now - expired_at_;
  expired_at_ = now;
  auto next = now + seconds(1);
  for (auto at = leases_.begin(); at != leases_.end();) {
    Lease& lease = at->second;
    if (stood_still > kStoodStill) lease.end += stood_still;
    if (lease.end > now) {
      next = std::min(next, lease.end);
      ++at;
      continue;
    }
    const int64_t id = at->first;
    at = leases_.erase(at);
    erase_records_of(id);
  }
  return next;
}

std::variant<EmbeddedStore::Watcher, Answer> EmbeddedStore::watch(const std::string& body) {
  Watcher watcher;
  const std::lock_guard lock(mutex_);
  try {
    for (const std::string& line : split(body, '\n')) {
      if (line.empty()) continue;
      const Json request = parse_json(line);
      const Json& create = field(request, "create_request");
      if (!create.is_object() || watcher.ranges_.size() == kMostRanges)
        throw Refusal{GrpcCode::invalid_argument, "no create_request, or too many of them"};
      const int64_t start = number(create, "start_revision");
      Watcher::Range range{std::to_string(number(create, "watch_id")), key_of(create),
                           bytes(create, "range_end"), start > 0 ? start : revision_ + 1};
      watcher.lines_.push_back(
          Json{{"result", {{"header", header()}, {"watch_id", range.id}, {"created", true}}}}
              .dump());
      watcher.ranges_.push_back(std::move(range));
    }
  } catch (const Refusal& refusal) {
    return answer_of(refusal);
  }
  return watcher;
}

std::vector<std::string> EmbeddedStore::next_lines(Watcher& watcher, milliseconds timeout) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, timeout, [&] { return closed_ || add_lines(watcher); });
  return std::exchange(watcher.lines_, {});
}

bool EmbeddedStore::add_lines(Watcher& watcher) {
  std::erase_if(watcher.ranges_, [&](Watcher::Range& range) {
    Json result = {{"header", header()}, {"watch_id", range.id}};
    const bool forgotten = range.next <= compacted_;
    if (forgotten) {
      result["canceled"] = true;
      result["compact_revision"] = std::to_string(compacted_ + 1);
    }
    auto at = std::partition_point(events_.begin(), events_.end(),
                                   [&](const Event& event) { return event.revision < range.next; });
    for (; !forgotten && at != events_.end(); ++at) {
      if (!in_range(at->key, range.key, range.end)) continue;
      if (at->record)
        result["events"].push_back({{"kv", json_of(*at->record)}});
      else
        result["events"].push_back(
            {{"type", "DELETE"}, {"kv", json_of({at->key, "", at->revision})}});
    }
    if (result.contains("events") || forgotten)
      watcher.lines_.push_back(Json{{"result", std::move(result)}}.dump());
    range.next = std::max(range.next, revision_ + 1);
    return forgotten;
  });
  return !watcher.lines_.empty();
}

void EmbeddedStore::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

}  // namespace lockstep::elastic
