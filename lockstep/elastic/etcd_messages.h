#pragma once

#include <optional>
#include <string>

#include "lockstep/elastic/gateway.h"

namespace lockstep::elastic {

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
