#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/elastic/registry.h"

// How etcd's version 3 speaks JSON: keys and values in base64, 64-bit numbers as text, fields that
// are zero left out. What the client and the embedded server share. All of it is thread-safe.
namespace lockstep::elastic {

using Json = nlohmann::json;

/// gRPC's status codes that mean something here.
enum class GrpcCode : int {
  cancelled = 1,
  unknown = 2,
  invalid_argument = 3,
  deadline_exceeded = 4,
  not_found = 5,
  permission_denied = 7,
  resource_exhausted = 8,
  aborted = 10,
  unimplemented = 12,
  unavailable = 14,
  unauthenticated = 16,
};

std::string to_base64(std::string_view bytes);
/// None for what is not strict base64.
std::optional<std::string> from_base64(std::string_view text);

/// The JSON of the text; its `is_discarded()` is true where it is none.
Json parse_json(std::string_view text);
/// An object's field; null where there is none, or no object.
const Json& field(const Json& object, const char* name);
/// A field that is a whole number, or a text of one. 0 where there is none. None for all else.
std::optional<int64_t> int_field(const Json& object, const char* name);
/// Bytes in base64. Empty where there is none. None for all else.
std::optional<std::string> bytes_field(const Json& object, const char* name);

/// etcd's "range_end" for all keys that begin with the prefix: the first key behind them.
std::string prefix_end(std::string prefix);

/// etcd's "kv".
Json json_of(const Record& record);
std::optional<Record> record_of(const Json& kv);

// ---- The client's side

/// What is sent for a request: a POST of JSON.
struct EtcdMessage {
  std::string path;
  std::string body;
};

EtcdMessage message_of(const Request& request);

/// What a server's answer says, which may be an error of the kind that `is_reply` is true for.
/// None where it is not understood.
std::optional<Reply> reply_of(const Request& request, const Json& answer);

/// Whether an error says how the request went, and so is no failure: its lease is gone.
bool is_reply(const Request& request, const Json& error);

/// The "create_request" of a watch.
std::string watch_message(const std::string& prefix, uint64_t id, int64_t first_revision);

/// "put of 'key'", for messages.
std::string describe(const Request& request);

}  // namespace lockstep::elastic
