#include "lockstep/base/host_address.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/in_time.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

ResolvedAddress describe(const addrinfo& info) {
  ResolvedAddress address;
  std::memcpy(&address.socket, info.ai_addr,
              std::min<size_t>(info.ai_addrlen, sizeof address.socket));
  address.text = numeric_text(address.socket);
  address.is_loopback = address.text == "::1" || address.text.starts_with("127.");
  return address;
}

/// All that the resolver knows of a host, or its error. Its call takes as long as the name servers
/// like.
struct Answer {
  int error = 0;
  std::vector<ResolvedAddress> addresses = {};
};
Answer ask(const std::string& host, int flags) {
  addrinfo hints{}, *list = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  Answer answer{getaddrinfo(host.c_str(), nullptr, &hints, &list)};
  if (answer.error != 0) return answer;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, freeaddrinfo);
  for (const addrinfo* info = list; info; info = info->ai_next)
    if (info->ai_family == AF_INET || info->ai_family == AF_INET6)
      answer.addresses.push_back(describe(*info));
  if (answer.addresses.empty()) answer.error = EAI_NONAME;
  return answer;
}

/// Numbers need no resolver, and no thread of one.
Answer ask_for_number(const std::string& host) {
  return ask(host, AI_NUMERICHOST);
}

Answer look_up(const std::string& host, milliseconds timeout) {
  if (auto answer = ask_for_number(host); answer.error == 0) return answer;
  return in_time([host] { return ask(host, 0); }, timeout).value_or(Answer{EAI_AGAIN});
}

/// The first address of this host's interfaces that `wanted` takes, IPv4 before IPv6; else empty.
template <class Wanted>
std::string first_interface_address(const Wanted& wanted) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = list; entry; entry = entry->ifa_next) {
      if (!entry->ifa_addr || entry->ifa_addr->sa_family != family || !wanted(*entry)) continue;
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

}  // namespace

std::string numeric_text(const sockaddr_storage& storage) {
  char text[NI_MAXHOST] = {};
  getnameinfo(reinterpret_cast<const sockaddr*>(&storage), sizeof storage, text, sizeof text,
              nullptr, 0, NI_NUMERICHOST);
  return text;
}

sockaddr_storage socket_address(const ResolvedAddress& address, uint16_t port) {
  sockaddr_storage storage = address.socket;
  reinterpret_cast<sockaddr_in*>(&storage)->sin_port = htons(port);  // IPv6 has it there, too.
  return storage;
}

sockaddr_storage local_name(int fd) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0) {
    throw SystemError("cannot tell where socket " + std::to_string(fd) + " is bound", errno);
  }
  return storage;
}

std::vector<ResolvedAddress> resolve_host(const std::string& host, milliseconds timeout,
                                          milliseconds unknown_for) {
  if (host.empty()) throw UsageError("the address to connect to is empty");
  const auto start = Clock::now();
  const auto unknown_deadline = start + std::min(timeout, unknown_for);
  milliseconds pause{20};
  while (true) {
    auto [error, addresses] = look_up(host, time_left(start + timeout));
    if (error == 0) return std::move(addresses);
    const bool unknown = error == EAI_NONAME || error == EAI_NODATA;
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

std::string without_brackets(const std::string& host) {
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return bracketed ? host.substr(1, host.size() - 2) : host;
}

void check_host(const std::string& setting, const std::string& host) {
  const auto is_of_name = [](unsigned char c) {
    return std::isalnum(c) || c > 127 || std::strchr(".-_", c);
  };
  if (is_numeric_host(host) || std::all_of(host.begin(), host.end(), is_of_name)) return;
  throw UsageError(
      setting + "='" + host + "' is no host's name or address",
      "one name or address of the host of rank 0, as in host0 or 10.0.0.1. A port has a "
      "setting of its own");
}

bool is_numeric_host(const std::string& host) {
  return ask_for_number(host).error == 0;
}

bool is_loopback_host(const std::string& host) {
  const auto answer = ask_for_number(host);
  return to_lower(host) == "localhost" ||
         (answer.error == 0 && answer.addresses.front().is_loopback);
}

std::string address_of_interface(const std::string& interface) {
  return first_interface_address([&](const ifaddrs& entry) { return interface == entry.ifa_name; });
}

std::string local_address_towards(const std::string& host) {
  for (const auto& address : look_up(host, milliseconds(5000)).addresses) {
    // Connecting a datagram socket picks the route and sends nothing.
    const UniqueFd fd(socket(address.socket.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    const auto storage = socket_address(address, 9);
    if (!fd || connect(fd.get(), reinterpret_cast<const sockaddr*>(&storage), sizeof storage) != 0)
      continue;
    return numeric_text(local_name(fd.get()));
  }
  return {};
}

std::string outward_address() {
  // Reserved for documentation (RFC 5737): the route there is the one to any other host.
  const std::string routed = local_address_towards("192.0.2.1");
  if (!routed.empty() && !is_loopback_host(routed)) return routed;
  const std::string found = first_interface_address([](const ifaddrs& entry) {
    constexpr unsigned kWanted = IFF_UP | IFF_RUNNING;
    return (entry.ifa_flags & (kWanted | IFF_LOOPBACK)) == kWanted;
  });
  return found.empty() ? "127.0.0.1" : found;
}

std::string reachable_address(const std::string& master) {
  const std::string address = master.empty() ? "" : local_address_towards(master);
  return address.empty() || is_loopback_host(address) ? outward_address() : address;
}

}  // namespace lockstep
