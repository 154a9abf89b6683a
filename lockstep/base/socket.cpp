#include "lockstep/base/socket.h"

#include <dirent.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kBacklog = 4096;  // As many ranks as a host may have come at once.

// 0 on success, else errno.
int try_listen(const ResolvedAddress& address, uint16_t port, bool dual_stack, UniqueFd& out) {
  UniqueFd fd(socket(address.socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return errno;
  const int on = 1, off = 0;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (dual_stack) setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  const auto storage = socket_address(address, port);
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&storage), sizeof storage) != 0)
    return errno;
  if (listen(fd.get(), kBacklog) != 0) return errno;
  out = std::move(fd);
  return 0;
}

int try_listen_on_all(uint16_t port, UniqueFd& out) {
  const auto numeric = [](const char* host) { return resolve_host(host, milliseconds(0)).at(0); };
  const int error = try_listen(numeric("::"), port, true, out);
  if (error != EAFNOSUPPORT && error != EADDRNOTAVAIL) return error;
  return try_listen(numeric("0.0.0.0"), port, false, out);
}

// A port on which nobody listens may be the one that the system picks for the connection itself.
bool connected_to_itself(int fd) {
  sockaddr_storage mine{}, theirs{};
  socklen_t length = sizeof mine, other = sizeof theirs;
  return getsockname(fd, reinterpret_cast<sockaddr*>(&mine), &length) == 0 &&
         getpeername(fd, reinterpret_cast<sockaddr*>(&theirs), &other) == 0 &&
         std::memcmp(&mine, &theirs, sizeof mine) == 0;
}

// 0 when the connection was accepted, else errno.
int try_connect(const ResolvedAddress& address, uint16_t port, milliseconds timeout,
                UniqueFd& out) {
  UniqueFd fd(socket(address.socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return errno;
  const auto storage = socket_address(address, port);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&storage), sizeof storage) != 0 &&
      errno != EINPROGRESS)
    return errno;
  pollfd entry{fd.get(), POLLOUT, 0};
  const int ready = poll(&entry, 1, static_cast<int>(std::max<int64_t>(1, timeout.count())));
  if (ready == 0) return ETIMEDOUT;
  if (ready < 0) return errno;
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error == 0 && connected_to_itself(fd.get())) return ECONNREFUSED;
  if (error == 0) out = std::move(fd);
  return error;
}

/// The port of a socket's address; 0 where it is not TCP's.
uint16_t port_of(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET)
    return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
  if (address.ss_family == AF_INET6)
    return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  return 0;
}

}  // namespace

UniqueFd listen_on(const std::string& host, uint16_t port, const ListenOptions& options) {
  UniqueFd fd;
  int error = EADDRNOTAVAIL;
  if (!host.empty()) {
    for (const auto& address : options.resolve(host)) {
      error = try_listen(address, port, false, fd);
      if (error == 0 || error == EADDRINUSE) break;
    }
  }
  if (host.empty() || (options.else_all && error == EADDRNOTAVAIL))
    error = try_listen_on_all(port, fd);
  if (fd) return fd;
  const std::string text =
      "cannot listen on " + endpoint_text(host.empty() ? "*" : host, port) + ": ";
  const std::string reason = std::strerror(error);
  if (error == EADDRINUSE) {
    throw CommError(text + "the port is taken (" + reason + ")",
                    "give another one by " + options.port_setting +
                        ", or end the program that holds it (ss -ltnp shows which)");
  }
  if (error == EADDRNOTAVAIL) {
    throw CommError(text + "that address is not of this host (" + reason + ")",
                    "MASTER_ADDR must be an address of the host on which rank 0 runs");
  }
  throw CommError(text + reason,
                  "check MASTER_ADDR and MASTER_PORT, or --master-addr and --master-port");
}

UniqueFd listen_as_master(const std::string& address, uint16_t port, bool one_host,
                          const ListenOptions& options) {
  ListenOptions wanted = options;
  wanted.else_all = options.else_all || !one_host;
  const bool plain = one_host || is_numeric_host(address) || is_loopback_host(address);
  return listen_on(plain ? address : "", port, wanted);
}

bool is_this_host(const std::string& host) {
  ListenOptions options;
  options.resolve = [](const std::string& name) {
    return resolve_host(name, std::chrono::seconds(2), std::chrono::milliseconds(0));
  };
  try {
    listen_on(host, 0, options);
    return true;
  } catch (const CommError&) {
    return false;
  }
}

uint16_t bound_port(int fd) {
  return port_of(local_name(fd));
}

std::string bound_host(int fd) {
  const auto name = local_name(fd);
  const std::string text = numeric_text(name);
  return text == "::" || text == "0.0.0.0" ? "127.0.0.1" : text;
}

UniqueFd connect_to(const std::string& host, uint16_t port, milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  const auto addresses = resolve_host(host, timeout);
  milliseconds pause{5};
  int error = ETIMEDOUT;
  while (true) {
    for (const auto& address : addresses) {
      // One address that swallows packets must not use up the time of the next.
      const auto share =
          std::max(milliseconds(1), time_left(deadline) / static_cast<int64_t>(addresses.size()));
      UniqueFd fd;
      error = try_connect(address, port, share, fd);
      if (error == 0) return fd;
    }
    if (Clock::now() + pause >= deadline) break;
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, milliseconds(50));
  }
  throw TimeoutError("nobody answers at " + endpoint_text(host, port) + " within " +
                         human_seconds(std::chrono::duration<double>(timeout).count()) + ": " +
                         std::strerror(error),
                     "rank 0 or the launcher listens there: is it up, are address and port right, "
                     "does a firewall stand between?");
}

std::string what_answers(const std::string& host, uint16_t port) {
  constexpr milliseconds kPatience{1'000};
  constexpr size_t kMost = 80;
  std::string heard;
  try {
    const UniqueFd fd = connect_to(host, port, kPatience);
    const std::string request = "GET / HTTP/1.0\r\n\r\n";
    send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    const auto deadline = Clock::now() + kPatience;
    while (heard.size() < kMost && heard.find('\n') == std::string::npos) {
      char bytes[kMost];
      pollfd entry{fd.get(), POLLIN, 0};
      if (poll(&entry, 1, static_cast<int>(time_left(deadline).count())) == 0)
        return "what answers there says nothing";
      const ssize_t got = recv(fd.get(), bytes, sizeof bytes, MSG_DONTWAIT);
      if (got <= 0) break;
      heard.append(bytes, static_cast<size_t>(got));
    }
  } catch (const CommError&) {
    return "nobody answers there now";
  }
  heard = heard.substr(0, std::min(kMost, heard.find_first_of("\r\n")));
  std::replace_if(
      heard.begin(), heard.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  if (heard.empty())
    return "what answers there hangs up on strangers, as a store of torchrun's or of another job "
           "does";
  return "what answers there says '" + heard + "'";
}

UniqueFd accept_from(int listener, milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  while (true) {
    pollfd entry{listener, POLLIN, 0};
    const int ready = poll(&entry, 1, static_cast<int>(time_left(deadline).count()));
    if (ready < 0 && errno != EINTR) throw SystemError("poll", errno);
    if (ready > 0) {
      UniqueFd fd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (fd) return fd;
      // Who has hung up before it was accepted.
      if (errno != ECONNABORTED && errno != EINTR && errno != EAGAIN)
        throw SystemError("accept", errno);
    }
    if (Clock::now() >= deadline) return {};
  }
}

namespace {

uint16_t peer_port(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  return getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 ? port_of(address)
                                                                              : 0;
}

bool is_limited(int fd) {
  unsigned limit = 0;
  socklen_t length = sizeof limit;
  return getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit, &length) == 0 && limit != 0;
}

milliseconds usable(milliseconds limit) {
  return std::clamp<milliseconds>(limit, milliseconds(1'000), std::chrono::hours(1));
}

/// Of one read or write. The system of a process that is stopped answers all that TCP asks.
void limit_waits_of(int fd, milliseconds limit) {
  limit = usable(limit);
  const timeval most{limit.count() / 1000, limit.count() % 1000 * 1000};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &most, sizeof most);
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most);
}

}  // namespace

// An answer that is owed to data which was not acknowledged ends by TCP_USER_TIMEOUT, one that is
// owed to data which was by probes.
void limit_silence_of(int fd, milliseconds limit) noexcept {
  limit = usable(limit);
  const int on = 1, probes = 3;
  const auto most = static_cast<unsigned>(limit.count());
  const int pause = std::max(1, static_cast<int>(limit.count() / 1000 / (probes + 1)));
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &most, sizeof most);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &pause, sizeof pause);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &pause, sizeof pause);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

void limit_silence(uint16_t port, milliseconds limit) noexcept {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/fd"), &closedir);
  const dirent* entry = nullptr;
  while (folder && (entry = readdir(folder.get())) != nullptr) {
    const int fd = static_cast<int>(std::strtol(entry->d_name, nullptr, 10));
    if (fd <= 2 || peer_port(fd) != port || is_limited(fd)) continue;
    limit_silence_of(fd, limit);
    limit_waits_of(fd, limit);
  }
}

}  // namespace lockstep
