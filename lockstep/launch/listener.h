#pragma once

#include <cstdint>
#include <string>

#include "lockstep/base/file.h"

namespace lockstep::launch {

/// A socket that is bound and listens, made before anyone is told its port, so that no port is
/// raced for. Connections wait in its backlog until someone serves it.
struct Listener {
  UniqueFd socket;
  uint16_t port = 0;
};

/// Listens on the address that `host` names. `port` of 0 is any free one. When `host` is an address
/// that this machine has not itself (it is reached through address translation), on all addresses.
/// Throws CommError naming host and port: it does not resolve, the port is taken or not allowed.
Listener listen_on(const std::string& host, uint16_t port);

}  // namespace lockstep::launch
