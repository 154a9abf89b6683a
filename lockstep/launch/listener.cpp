#include "lockstep/launch/listener.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "lockstep/base/error.h"

namespace lockstep::launch {
namespace {

// As many ranks as a host may have come at once.
constexpr int kBacklog = 4096;

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses resolve(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (host.empty() ? AI_PASSIVE : 0);
  addrinfo* found = nullptr;
  const int failure = getaddrinfo(host.empty() ? nullptr : host.c_str(),
                                  std::to_string(port).c_str(), &hints, &found);
  if (failure != 0) {
    throw CommError("the master address '" + host + "' does not resolve: " + gai_strerror(failure),
                    "give --master-addr a name or number of the host that runs rank 0");
  }
  return {found, freeaddrinfo};
}

/// The first of the addresses that can be bound; otherwise the last errno in `failure`.
UniqueFd bind_first(const addrinfo* addresses, int& failure) {
  for (const auto* address = addresses; address; address = address->ai_next) {
    UniqueFd fd(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int on = 1;
    if (fd && setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        ::bind(fd.get(), address->ai_addr, address->ai_addrlen) == 0 &&
        ::listen(fd.get(), kBacklog) == 0) {
      return fd;
    }
    failure = errno;
  }
  return {};
}

uint16_t port_of(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    throw SystemError("cannot read the port of a socket", errno);
  }
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

}  // namespace

Listener listen_on(const std::string& host, uint16_t port) {
  int failure = 0;
  UniqueFd fd = bind_first(resolve(host, port).get(), failure);
  if (!fd && failure == EADDRNOTAVAIL) fd = bind_first(resolve("", port).get(), failure);
  if (!fd) {
    const std::string where = host + ":" + std::to_string(port);
    throw CommError("cannot listen on " + where + ": " + std::strerror(failure),
                    failure == EADDRINUSE
                        ? "another program has the port; give another one by MASTER_PORT, or by "
                          "--master-port of `lockstep run`, which needs none on a single host"
                        : "check MASTER_ADDR, or --master-addr of `lockstep run`");
  }
  Listener listener;
  listener.port = port_of(fd.get());
  listener.socket = std::move(fd);
  return listener;
}

}  // namespace lockstep::launch
