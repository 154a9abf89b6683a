#include "lockstep/elastic/gateway.h"

#include <openssl/evp.h>

#include "lockstep/base/text.h"

namespace lockstep::elastic {

std::string to_base64(std::string_view bytes) {
  std::string text((bytes.size() + 2) / 3 * 4 + 1, '\0');  // OpenSSL adds a zero
  const int size =
      EVP_EncodeBlock(reinterpret_cast<unsigned char*>(text.data()),
                      reinterpret_cast<const unsigned char*>(bytes.data()), int(bytes.size()));
  text.resize(static_cast<size_t>(size));
  return text;
}

std::optional<std::string> from_base64(std::string_view text) {
  std::string bytes(text.size() / 4 * 3, '\0');
  const int size =
      EVP_DecodeBlock(reinterpret_cast<unsigned char*>(bytes.data()),
                      reinterpret_cast<const unsigned char*>(text.data()), int(text.size()));
  if (size < 0) return std::nullopt;
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  bytes.resize(static_cast<size_t>(size) - std::min(padding, static_cast<size_t>(size)));
  if (to_base64(bytes) != text) return std::nullopt;  // OpenSSL overlooks blanks
  return bytes;
}

Json parse_json(std::string_view text) {
  return Json::parse(text, nullptr, false);
}

const Json& field(const Json& object, const char* name) {
  static const Json none;
  if (!object.is_object()) return none;
  const auto found = object.find(name);
  return found == object.end() ? none : *found;
}

std::optional<int64_t> int_field(const Json& object, const char* name) {
  const Json& value = field(object, name);
  if (value.is_null()) return 0;
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_string()) return parse_int(value.get_ref<const std::string&>());
  return std::nullopt;
}

std::optional<std::string> bytes_field(const Json& object, const char* name) {
  const Json& value = field(object, name);
  if (value.is_null()) return "";
  if (!value.is_string()) return std::nullopt;
  return from_base64(value.get_ref<const std::string&>());
}

std::string prefix_end(std::string prefix) {
  while (!prefix.empty() && prefix.back() == '\xff') prefix.pop_back();
  if (prefix.empty()) return std::string(1, '\0');  // to the last key
  prefix.back() = static_cast<char>(prefix.back() + 1);
  return prefix;
}

Json json_of(const Record& record) {
  Json kv = {{"key", to_base64(record.key)}, {"mod_revision", std::to_string(record.revision)}};
  if (!record.value.empty()) kv["value"] = to_base64(record.value);
  if (record.lease != 0) kv["lease"] = std::to_string(record.lease);
  return kv;
}

std::optional<Record> record_of(const Json& kv) {
  auto key = bytes_field(kv, "key"), value = bytes_field(kv, "value");
  const auto revision = int_field(kv, "mod_revision"), lease = int_field(kv, "lease");
  if (!key || key->empty() || !value || !revision || !lease) return std::nullopt;
  return Record{std::move(*key), std::move(*value), *revision, *lease};
}

namespace {

using Kind = Request::Kind;

Json range_of_prefix(const std::string& prefix) {
  return {{"key", to_base64(prefix.empty() ? std::string(1, '\0') : prefix)},
          {"range_end", to_base64(prefix_end(prefix))}};
}

EtcdMessage put_message(const Request& request) {
  const std::string key = to_base64(request.key);
  const Json put = {
      {"key", key}, {"value", to_base64(request.value)}, {"lease", std::to_string(request.lease)}};
  if (!request.expected) return {"/v3/kv/put", put.dump()};
  const Json compare = {{"key", key},
                        {"target", "MOD"},
                        {"result", "EQUAL"},
                        {"mod_revision", std::to_string(*request.expected)}};
  const Json transaction = {{"compare", Json::array({compare})},
                            {"success", Json::array({Json{{"request_put", put}}})},
                            {"failure", Json::array({Json{{"request_range", {{"key", key}}}}})}};
  return {"/v3/kv/txn", transaction.dump()};
}

/// False where a record is not understood.
bool read_records(const Json& range, Reply& reply) {
  for (const Json& kv : field(range, "kvs")) {
    auto record = record_of(kv);
    if (!record) return false;
    reply.records.push_back(std::move(*record));
  }
  return true;
}

bool read_put(const Request& request, const Json& answer, Reply& reply) {
  const Record written{request.key, request.value, reply.revision, request.lease};
  if (!request.expected || field(answer, "succeeded") == true) {
    reply.records = {written};
    return true;
  }
  const Json& responses = field(answer, "responses");
  if (!responses.is_array() || responses.size() != 1 ||
      !read_records(field(responses[0], "response_range"), reply))
    return false;
  const bool ours = reply.records.size() == 1 && reply.records[0].value == request.value &&
                    reply.records[0].lease == request.lease;
  if (!ours) reply.outcome = Reply::Outcome::conflict;
  return true;
}

bool read_lease(const Request& request, const Json& answer, Reply& reply) {
  const bool keeps = request.kind == Kind::keep_lease;
  const Json& result = keeps ? field(answer, "result") : answer;
  const auto lease = int_field(result, "ID"), ttl = int_field(result, "TTL");
  if (!lease || !ttl || *lease == 0) return false;
  reply.lease = *lease;
  if (*ttl <= 0) reply.outcome = Reply::Outcome::lease_gone;
  return *ttl > 0 || keeps;
}

bool read_fields(const Request& request, const Json& answer, Reply& reply) {
  switch (request.kind) {
    case Kind::list:
      return read_records(answer, reply);
    case Kind::put:
      return read_put(request, answer, reply);
    case Kind::grant_lease:
    case Kind::keep_lease:
      return read_lease(request, answer, reply);
    default:
      return true;
  }
}

}  // namespace

EtcdMessage message_of(const Request& request) {
  switch (request.kind) {
    case Kind::list:
      return {"/v3/kv/range", range_of_prefix(request.key).dump()};
    case Kind::put:
      return put_message(request);
    case Kind::grant_lease:
      return {"/v3/lease/grant", Json{{"TTL", std::to_string(request.ttl.count())}}.dump()};
    case Kind::keep_lease:
      return {"/v3/lease/keepalive", Json{{"ID", std::to_string(request.lease)}}.dump()};
    default:
      return {"/v3/lease/revoke", Json{{"ID", std::to_string(request.lease)}}.dump()};
  }
}

bool is_reply(const Request& request, const Json& error) {
  return request.lease != 0 && int_field(error, "code") == int(GrpcCode::not_found);
}

std::optional<Reply> reply_of(const Request& request, const Json& answer) {
  Reply reply;
  if (is_reply(request, answer)) {
    reply.outcome = Reply::Outcome::lease_gone;
    return reply;
  }
  const bool keeps = request.kind == Kind::keep_lease;
  const auto revision =
      int_field(field(keeps ? field(answer, "result") : answer, "header"), "revision");
  if (!revision || *revision < 1) return std::nullopt;
  reply.revision = *revision;
  if (!read_fields(request, answer, reply)) return std::nullopt;
  return reply;
}

std::string watch_message(const std::string& prefix, uint64_t id, int64_t first_revision) {
  Json create = range_of_prefix(prefix);
  create["watch_id"] = std::to_string(id);
  create["start_revision"] = std::to_string(first_revision);
  return Json{{"create_request", std::move(create)}}.dump() + "\n";
}

std::string describe(const Request& request) {
  static constexpr const char* kNames[] = {"list", "put", "grant_lease", "keep_lease",
                                           "revoke_lease"};
  const std::string name = kNames[static_cast<size_t>(request.kind)];
  return request.key.empty() ? name : name + " of '" + request.key + "'";
}

}  // namespace lockstep::elastic
