#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

/// One address of a host.
struct ResolvedAddress {
  sockaddr_storage socket{};  ///< Of AF_INET or AF_INET6, without a port.
  std::string text;           ///< In numbers: "127.0.0.1", "::1", "fe80::1%eth0".
  bool is_loopback = false;
};

/// The addresses of a host. An unknown name is asked for again for `unknown_for`: a cluster's names
/// may appear after its processes start. A name that the resolver cannot answer for now is asked
/// for until the time-out. Throws CommError when it does not exist, TimeoutError when nobody
/// answers.
std::vector<ResolvedAddress> resolve_host(
    const std::string& host, std::chrono::milliseconds timeout,
    std::chrono::milliseconds unknown_for = std::chrono::seconds(10));

/// "::1" for "[::1]", the form of URLs; any other text as it is.
std::string without_brackets(const std::string& host);

/// Throws UsageError where `host`, which `setting` has, cannot be one name or address: a URL, two
/// addresses, blanks, a port behind it. Asks no resolver. Takes no brackets.
void check_host(const std::string& setting, const std::string& host);

/// True for an address in numbers, which needs no resolver.
bool is_numeric_host(const std::string& host);

/// True for an address or name that means this host's loopback: 127.x.x.x, ::1, localhost.
bool is_loopback_host(const std::string& host);

/// The first numeric address of one of this host's interfaces, IPv4 before IPv6. Empty when there
/// is no such interface or it has none.
std::string address_of_interface(const std::string& interface);

/// The numeric address of this host's interface from which packets to `host` leave. Empty when it
/// cannot be told. Sends nothing.
std::string local_address_towards(const std::string& host);

/// An address of this host that others reach. It is the one from which packets to other hosts
/// leave. Else it is that of an interface which is up, else loopback.
std::string outward_address();

/// An address of this host that the other hosts of a job reach, of whose first host `master` is the
/// name or address. Where that means loopback here, as Debian's own entry in /etc/hosts does, or is
/// empty, the route to any other address tells.
std::string reachable_address(const std::string& master);

/// What the system's calls want.
sockaddr_storage socket_address(const ResolvedAddress& address, uint16_t port);
/// "127.0.0.1", "::1", "fe80::1%eth0".
std::string numeric_text(const sockaddr_storage& address);
/// What a socket is bound to. Throws SystemError.
sockaddr_storage local_name(int fd);

}  // namespace lockstep
