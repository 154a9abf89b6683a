#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/base/file.h"

namespace lockstep {

/// One address of a host, in numbers: "127.0.0.1", "::1".
struct ResolvedAddress {
  int family = 0;  ///< AF_INET or AF_INET6
  std::string text;
  bool is_loopback = false;
};

/// The addresses of a host. A name that is unknown is asked for again for up to 10 s (a cluster's
/// names may appear after its processes start), one that the resolver cannot answer for now until
/// the time-out. Throws CommError when it does not exist, TimeoutError when nobody answers.
std::vector<ResolvedAddress> resolve_host(const std::string& host,
                                          std::chrono::milliseconds timeout);

/// True for an address or name that means this host's loopback: 127.x.x.x, ::1, localhost.
bool is_loopback_host(const std::string& host);

/// A bound and listening TCP socket. `host` empty: all interfaces, IPv6 and IPv4. Port 0: any free
/// one. Throws CommError naming address and port when it is taken or not ours.
UniqueFd listen_on(const std::string& host, uint16_t port);

/// The port a socket is bound to.
uint16_t bound_port(int fd);

/// An address at which this host reaches the socket: the one it is bound to, or loopback when it is
/// bound to all interfaces.
std::string bound_host(int fd);

/// Waits until something accepts connections at host:port, asking again every 5 to 50 ms: c10d's
/// own client waits half a second and more between attempts. Throws TimeoutError naming the address
/// and the last reason.
void wait_until_listening(const std::string& host, uint16_t port,
                          std::chrono::milliseconds timeout);

/// A connection to something that listens at host:port; does not block. Throws TimeoutError naming
/// the address and the reason, CommError when it does not resolve.
UniqueFd connect_to(const std::string& host, uint16_t port, std::chrono::milliseconds timeout);

/// One connection that waits when nobody else is there; null when none comes within `timeout`. It
/// does not block. Throws SystemError.
UniqueFd accept_from(int listener, std::chrono::milliseconds timeout);

/// This connection fails once its other end has been silent for `limit` (1 s to 1 h), though
/// nothing is sent over it.
void limit_silence_of(int fd, std::chrono::milliseconds limit) noexcept;

/// For connections that others own, to a host that may be cut off from the network without a word:
/// this process's TCP connections to `peer_port`, of any host, fail once the peer has been silent
/// for `limit` where it owes an answer. The system's own limit is a quarter of an hour. Never
/// throws.
void limit_silence(uint16_t peer_port, std::chrono::milliseconds limit) noexcept;

/// The first numeric address of one of this host's interfaces, IPv4 before IPv6; empty when there
/// is no such interface or it has none.
std::string address_of_interface(const std::string& interface);

/// The numeric address of this host's interface from which packets to `host` leave; empty when it
/// cannot be told. Sends nothing.
std::string local_address_towards(const std::string& host);

}  // namespace lockstep
