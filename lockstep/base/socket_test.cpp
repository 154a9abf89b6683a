#include "lockstep/base/socket.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <netinet/in.h>

#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/host_address.h"

namespace lockstep {
namespace socket_test {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string refusal(const std::string& host, uint16_t port) {
  ListenOptions options;
  options.resolve = [](const std::string& name) {
    return resolve_host(name, milliseconds(5'000), milliseconds(0));
  };
  try {
    listen_on(host, port, options);
  } catch (const CommError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

std::string bound_to(const UniqueFd& listener) {
  return numeric_text(local_name(listener.get()));
}

bool is_on_all(const UniqueFd& listener) {
  return bound_to(listener) == "::" || bound_to(listener) == "0.0.0.0";
}

/// What Debian's /etc/hosts says of the host's own name.
std::vector<ResolvedAddress> debians_own_name(const std::string&) {
  return resolve_host("127.0.1.1", std::chrono::milliseconds(0));
}

TEST(ListenOn, TakesAFreePortOnTheGivenAddressOnly) {
  const UniqueFd listener = listen_on("127.0.0.1", 0);
  EXPECT_GT(bound_port(listener.get()), 0);
  EXPECT_EQ(numeric_text(local_name(listener.get())), "127.0.0.1");
  EXPECT_TRUE(connect_to("127.0.0.1", bound_port(listener.get()), milliseconds(10'000)))
      << "connections wait before anyone serves them";
  EXPECT_TRUE(is_loopback_host(bound_host(listen_on("localhost", 0).get())));
}

/// "fe80::1%eth0"; empty: no interface has one.
std::string link_local_address() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  for (const ifaddrs* entry = list; entry; entry = entry->ifa_next) {
    if (!entry->ifa_addr || entry->ifa_addr->sa_family != AF_INET6) continue;
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr);
    if (!IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr)) continue;
    char text[INET6_ADDRSTRLEN] = {};
    inet_ntop(AF_INET6, &v6->sin6_addr, text, sizeof text);
    return std::string(text) + "%" + entry->ifa_name;
  }
  return {};
}

TEST(ListenOn, AnAddressOfTheLinkAlone) {
  const std::string address = link_local_address();
  if (address.empty()) GTEST_SKIP() << "no interface has an address fe80::";
  const UniqueFd listener = listen_on(address, 0);
  EXPECT_TRUE(connect_to(address, bound_port(listener.get()), milliseconds(10'000)));
}

TEST(ListenOn, NoAddressMeansAll) {
  const UniqueFd listener = listen_on("", 0);
  EXPECT_EQ(bound_host(listener.get()), "127.0.0.1");
  EXPECT_TRUE(connect_to("127.0.0.1", bound_port(listener.get()), milliseconds(10'000)));
}

TEST(ListenOn, ATakenPortIsNamed) {
  const UniqueFd first = listen_on("127.0.0.1", 0);
  const uint16_t port = bound_port(first.get());
  EXPECT_THAT(refusal("127.0.0.1", port),
              AllOf(HasSubstr("127.0.0.1:" + std::to_string(port)), HasSubstr("port is taken")));
}

TEST(ListenOn, ANameThatDoesNotResolveIsNamed) {
  EXPECT_THAT(refusal("no-such-host.invalid", 0), HasSubstr("no-such-host.invalid"));
}

TEST(ListenOn, AnAddressOfAnotherMachineIsRefusedOrMeansAll) {
  const char* other = "192.0.2.1";  // reserved for documentation (RFC 5737)
  EXPECT_THAT(refusal(other, 0), HasSubstr("not of this host"));
  ListenOptions options;
  options.else_all = true;
  EXPECT_TRUE(is_on_all(listen_on(other, 0, options)));
}

TEST(WhatAnswers, SaysTheFirstLine) {
  const UniqueFd listener = listen_on("127.0.0.1", 0);
  const auto answer = [&](const std::string& words) {
    std::thread server([&] {
      const UniqueFd fd = accept_from(listener.get(), milliseconds(10'000));
      send(fd.get(), words.data(), words.size(), MSG_NOSIGNAL);
      shutdown(fd.get(), SHUT_WR);
    });
    const auto said = what_answers("127.0.0.1", bound_port(listener.get()));
    server.join();
    return said;
  };
  EXPECT_THAT(answer("SSH-2.0-OpenSSH_9.2\r\nmore"),
              AllOf(HasSubstr("'SSH-2.0-OpenSSH_9.2'"), ::testing::Not(HasSubstr("more"))));
  EXPECT_THAT(answer("-ERR \x1b[31m"), HasSubstr("'-ERR ?[31m'"));
  EXPECT_THAT(answer(""), HasSubstr("hangs up"));
}

TEST(ListenAsMaster, OfSeveralHostsANameMeansAllInterfaces) {
  ListenOptions options;
  options.resolve = debians_own_name;
  EXPECT_TRUE(is_on_all(listen_as_master("own-name", 0, false, options)));
  EXPECT_EQ(bound_to(listen_as_master("own-name", 0, true, options)), "127.0.1.1");
}

TEST(ListenAsMaster, AnAddressInNumbersIsKept) {
  EXPECT_EQ(bound_to(listen_as_master("127.0.0.2", 0, false)), "127.0.0.2");
  EXPECT_EQ(bound_to(listen_as_master("127.0.0.2", 0, true)), "127.0.0.2");
  EXPECT_TRUE(is_loopback_host(bound_to(listen_as_master("localhost", 0, false))));
  EXPECT_TRUE(is_on_all(listen_as_master("192.0.2.1", 0, false))) << "of another machine";
}

}  // namespace socket_test
}  // namespace lockstep
