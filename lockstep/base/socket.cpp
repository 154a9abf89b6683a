#include "lockstep/base/socket.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
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
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kUnknownNameRetry{10'000};
constexpr int kBacklog = 2048;

milliseconds left_until(Clock::time_point deadline) {
  return std::max(milliseconds(0),
                  std::chrono::duration_cast<milliseconds>(deadline - Clock::now()));
}

std::string endpoint(const std::string& host, uint16_t port) {
  const bool v6 = host.find(':') != std::string::npos;
  return (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

std::string numeric_text(const sockaddr_storage& storage) {
  char text[INET6_ADDRSTRLEN] = {};
  if (storage.ss_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr, text,
              sizeof text);
  } else {
    inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr, text,
              sizeof text);
  }
  return text;
}

ResolvedAddress describe(const addrinfo& info) {
  sockaddr_storage storage{};
  std::memcpy(&storage, info.ai_addr, std::min<size_t>(info.ai_addrlen, sizeof storage));
  ResolvedAddress address;
  address.family = info.ai_family;
  address.text = numeric_text(storage);
  address.is_loopback = address.text == "::1" || address.text.starts_with("127.");
  return address;
}

// One request to the resolver that can be given up: the C library's own call takes as long as the
// name servers like. A request that cannot be cancelled is left to its thread, with its memory.
struct Lookup {
  std::string host;
  addrinfo hints{};
  gaicb request{};
  ~Lookup() {
    if (request.ar_result) freeaddrinfo(request.ar_result);
  }
};

int look_up(const std::string& host, milliseconds timeout, std::vector<ResolvedAddress>& out) {
  auto lookup = std::make_unique<Lookup>();
  lookup->host = host;
  lookup->hints.ai_socktype = SOCK_STREAM;
  lookup->request.ar_name = lookup->host.c_str();
  lookup->request.ar_request = &lookup->hints;
  gaicb* list[1] = {&lookup->request};
  if (const int error = getaddrinfo_a(GAI_NOWAIT, list, 1, nullptr)) return error;
  const auto deadline = Clock::now() + timeout;
  while (gai_error(list[0]) == EAI_INPROGRESS) {
    const auto left = left_until(deadline);
    if (left.count() == 0) {
      if (gai_cancel(list[0]) == EAI_NOTCANCELED) static_cast<void>(lookup.release());
      return EAI_AGAIN;
    }
    const timespec wait{left.count() / 1000, (left.count() % 1000) * 1'000'000};
    gai_suspend(list, 1, &wait);
  }
  if (const int error = gai_error(list[0])) return error;
  for (const addrinfo* info = lookup->request.ar_result; info; info = info->ai_next) {
    if (info->ai_family == AF_INET || info->ai_family == AF_INET6) out.push_back(describe(*info));
  }
  return out.empty() ? EAI_NONAME : 0;
}

// Numbers need no resolver, and no thread of one.
bool parse_numeric(const std::string& host, std::vector<ResolvedAddress>& out) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* result = nullptr;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &result) != 0) return false;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(result, freeaddrinfo);
  out.push_back(describe(*result));
  return true;
}

sockaddr_storage socket_address(const ResolvedAddress& address, uint16_t port, socklen_t& size) {
  sockaddr_storage storage{};
  if (address.family == AF_INET) {
    auto* in = reinterpret_cast<sockaddr_in*>(&storage);
    in->sin_family = AF_INET;
    in->sin_port = htons(port);
    inet_pton(AF_INET, address.text.c_str(), &in->sin_addr);
    size = sizeof *in;
  } else {
    auto* in = reinterpret_cast<sockaddr_in6*>(&storage);
    in->sin6_family = AF_INET6;
    in->sin6_port = htons(port);
    inet_pton(AF_INET6, address.text.c_str(), &in->sin6_addr);
    size = sizeof *in;
  }
  return storage;
}

// 0 on success, else errno.
int try_listen(const ResolvedAddress& address, uint16_t port, bool dual_stack, UniqueFd& out) {
  UniqueFd fd(socket(address.family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return errno;
  const int on = 1, off = 0;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (dual_stack) setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  socklen_t size = 0;
  const auto storage = socket_address(address, port, size);
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&storage), size) != 0) return errno;
  if (listen(fd.get(), kBacklog) != 0) return errno;
  out = std::move(fd);
  return 0;
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
  UniqueFd fd(socket(address.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return errno;
  socklen_t size = 0;
  const auto storage = socket_address(address, port, size);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&storage), size) != 0 &&
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

sockaddr_storage local_name(int fd) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0) {
    throw SystemError("cannot tell where socket " + std::to_string(fd) + " is bound", errno);
  }
  return storage;
}

}  // namespace

std::vector<ResolvedAddress> resolve_host(const std::string& host, milliseconds timeout) {
  if (host.empty()) throw UsageError("the address to connect to is empty");
  std::vector<ResolvedAddress> addresses;
  if (parse_numeric(host, addresses)) return addresses;
  const auto start = Clock::now();
  const auto unknown_deadline = start + std::min(timeout, kUnknownNameRetry);
  milliseconds pause{20};
  while (true) {
    const int error = look_up(host, left_until(start + timeout), addresses);
    if (error == 0) return addresses;
    const bool unknown = error == EAI_NONAME;
    const auto deadline = unknown ? unknown_deadline : start + timeout;
    if (Clock::now() + pause >= deadline) {
      const std::string text =
          "cannot resolve the address '" + host + "': " + gai_strerror(error) + " (tried for " +
          human_seconds(std::chrono::duration<double>(Clock::now() - start).count()) + ")";
      const std::string hint = "check --master-addr or MASTER_ADDR, or give the address in numbers";
      if (unknown) throw CommError(text, hint);
      throw TimeoutError(text, hint);
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, milliseconds(500));
  }
}

bool is_loopback_host(const std::string& host) {
  if (to_lower(host) == "localhost") return true;
  std::vector<ResolvedAddress> addresses;
  return parse_numeric(host, addresses) && addresses.front().is_loopback;
}

UniqueFd listen_on(const std::string& host, uint16_t port) {
  UniqueFd fd;
  int error = 0;
  if (host.empty()) {
    error = try_listen({AF_INET6, "::", false}, port, true, fd);
    if (error == EAFNOSUPPORT || error == EADDRNOTAVAIL) {
      error = try_listen({AF_INET, "0.0.0.0", false}, port, false, fd);
    }
  } else {
    for (const auto& address : resolve_host(host, kUnknownNameRetry)) {
      error = try_listen(address, port, false, fd);
      if (error == 0 || error == EADDRINUSE) break;
    }
  }
  if (fd) return fd;
  const std::string where = endpoint(host.empty() ? "*" : host, port);
  if (error == EADDRINUSE) {
    throw CommError(
        "cannot listen on " + where + ": the port is taken (" + std::strerror(error) + ")",
        "give another one by --master-port or MASTER_PORT, or end the program that "
        "holds it (ss -ltnp shows which)");
  }
  if (error == EADDRNOTAVAIL) {
    throw CommError("cannot listen on " + where + ": that address is not of this host (" +
                        std::strerror(error) + ")",
                    "MASTER_ADDR must be an address of the host on which rank 0 runs");
  }
  throw CommError("cannot listen on " + where + ": " + std::strerror(error));
}

uint16_t bound_port(int fd) {
  const auto name = local_name(fd);
  if (name.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&name)->sin6_port);
  }
  return ntohs(reinterpret_cast<const sockaddr_in*>(&name)->sin_port);
}

std::string bound_host(int fd) {
  const auto name = local_name(fd);
  const std::string text = numeric_text(name);
  return text == "::" || text == "0.0.0.0" ? "127.0.0.1" : text;
}

void wait_until_listening(const std::string& host, uint16_t port, milliseconds timeout) {
  connect_to(host, port, timeout);
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
          std::max(milliseconds(1), left_until(deadline) / static_cast<int64_t>(addresses.size()));
      UniqueFd fd;
      error = try_connect(address, port, share, fd);
      if (error == 0) return fd;
    }
    if (Clock::now() + pause >= deadline) break;
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, milliseconds(50));
  }
  throw TimeoutError("nobody answers at " + endpoint(host, port) + " within " +
                         human_seconds(std::chrono::duration<double>(timeout).count()) + ": " +
                         std::strerror(error),
                     "rank 0 or the launcher listens there: is it up, are address and port right, "
                     "does a firewall stand between?");
}

UniqueFd accept_from(int listener, milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  while (true) {
    pollfd entry{listener, POLLIN, 0};
    const int ready = poll(&entry, 1, static_cast<int>(left_until(deadline).count()));
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

uint16_t peer_port_of(int fd) {
  sockaddr_storage peer{};
  socklen_t length = sizeof peer;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) return 0;
  if (peer.ss_family == AF_INET) return ntohs(reinterpret_cast<sockaddr_in&>(peer).sin_port);
  if (peer.ss_family == AF_INET6) return ntohs(reinterpret_cast<sockaddr_in6&>(peer).sin6_port);
  return 0;
}

}  // namespace

// An answer that is owed to data which was not acknowledged ends by TCP_USER_TIMEOUT, one that is
// owed to data which was by probes.
void limit_silence_of(int fd, milliseconds limit) noexcept {
  limit = std::clamp<milliseconds>(limit, milliseconds(1'000), std::chrono::hours(1));
  const int on = 1, probes = 3;
  const auto most = static_cast<unsigned>(limit.count());
  const int pause = std::max(1, static_cast<int>(limit.count() / 1000 / (probes + 1)));
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &most, sizeof most);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &pause, sizeof pause);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &pause, sizeof pause);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

void limit_silence(uint16_t peer_port, milliseconds limit) noexcept {
  DIR* folder = opendir("/proc/self/fd");
  if (!folder) return;
  while (const dirent* entry = readdir(folder)) {
    const int fd = std::atoi(entry->d_name);
    if (fd > 2 && peer_port_of(fd) == peer_port) limit_silence_of(fd, limit);
  }
  closedir(folder);
}

std::string address_of_interface(const std::string& interface) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = list; entry; entry = entry->ifa_next) {
      if (!entry->ifa_addr || entry->ifa_addr->sa_family != family || interface != entry->ifa_name)
        continue;
      sockaddr_storage storage{};
      std::memcpy(&storage, entry->ifa_addr,
                  family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
      const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&storage);
      // An address of the link alone means nothing to others.
      if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr)) continue;
      return numeric_text(storage);
    }
  }
  return {};
}

std::string local_address_towards(const std::string& host) {
  std::vector<ResolvedAddress> addresses;
  if (!parse_numeric(host, addresses) && look_up(host, milliseconds(5000), addresses) != 0)
    return {};
  for (const auto& address : addresses) {
    // Connecting a datagram socket picks the route and sends nothing.
    const UniqueFd fd(socket(address.family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    socklen_t size = 0;
    const auto storage = socket_address(address, 9, size);
    if (!fd || connect(fd.get(), reinterpret_cast<const sockaddr*>(&storage), size) != 0) continue;
    return numeric_text(local_name(fd.get()));
  }
  return {};
}

}  // namespace lockstep
