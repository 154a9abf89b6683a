#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/base/file.h"
#include "lockstep/base/host_address.h"

namespace lockstep {

/// The addresses of a host; throws as resolve_host does.
using Resolver = std::function<std::vector<ResolvedAddress>(const std::string& host)>;

struct ListenOptions {
  /// Asks patiently: a cluster's names may appear late.
  Resolver resolve = [](const std::string& host) {
    return resolve_host(host, std::chrono::seconds(10));
  };
  /// Where the address is none of this host (it is reached through address translation): on all
  /// interfaces. Off: an error.
  bool else_all = false;
  /// What sets the port, for the hint where it is taken.
  std::string port_setting =
      "--master-port or MASTER_PORT (`lockstep run` on a single host needs none)";
};

/// A bound and listening TCP socket. Connections wait in it until someone serves them. `host`
/// empty: all interfaces, IPv6 and IPv4. Port 0: any free one. Throws CommError naming address and
/// port when the port is taken or the address not ours, and naming the address when it does not
/// resolve.
UniqueFd listen_on(const std::string& host, uint16_t port, const ListenOptions& options = {});

/// Where the ranks of a job look for their store at `address`, which all of them were told. On one
/// host: on that address. Of several hosts: on it where it is in numbers or localhost, and on all
/// interfaces where it is another name. A name may mean loopback here and a real address elsewhere:
/// Debian's /etc/hosts gives 127.0.1.1 to the host's own. Throws as listen_on.
UniqueFd listen_as_master(const std::string& address, uint16_t port, bool one_host,
                          const ListenOptions& options = {});

/// Whether a socket can be bound to `host`, so it is a name or address of this host. A name that is
/// unknown is asked for once.
bool is_this_host(const std::string& host);

/// The port a socket is bound to.
uint16_t bound_port(int fd);

/// An address at which this host reaches the socket: the one it is bound to, or loopback when it is
/// bound to all interfaces.
std::string bound_host(int fd);

/// A connection to something that listens at host:port. Does not block. Asks again every 5 to 50
/// ms, where c10d's own client waits half a second and more. Throws TimeoutError naming the address
/// and the last reason, CommError when it does not resolve.
UniqueFd connect_to(const std::string& host, uint16_t port, std::chrono::milliseconds timeout);

/// For messages: what answers at host:port in place of what was expected there. "what answers there
/// says 'SSH-2.0-OpenSSH_9.2'". Takes a second or two at most.
std::string what_answers(const std::string& host, uint16_t port);

/// One connection that is waiting, or comes within `timeout`. Null when none does. Reads and writes
/// on it do not block. Throws SystemError.
UniqueFd accept_from(int listener, std::chrono::milliseconds timeout);

/// This connection fails once its other end has been silent for `limit` (1 s to 1 h), though
/// nothing is sent over it.
void limit_silence_of(int fd, std::chrono::milliseconds limit) noexcept;

/// For connections that others own, to a host that may be cut off from the network without a word,
/// or to a process that may be stopped. This process's TCP connections to `peer_port`, of any host,
/// fail once the peer owes an answer for `limit` (1 s to 1 h). The system's own limit is a quarter
/// of an hour. A read or write that blocks takes no longer: it fails by EAGAIN. Connections that
/// have such a limit keep it. Never throws.
///
/// It scans this process's descriptors, as c10d's TCPStore shows its socket to nobody. It can go
/// once TCPStore takes such a limit as an option, or a connected descriptor of ours.
void limit_silence(uint16_t peer_port, std::chrono::milliseconds limit) noexcept;

}  // namespace lockstep
