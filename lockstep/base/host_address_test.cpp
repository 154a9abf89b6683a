#include "lockstep/base/host_address.h"

#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <net/if.h>

namespace lockstep {
namespace host_address_test {

TEST(HostAddress, KnowsLoopback) {
  EXPECT_TRUE(is_loopback_host("127.0.1.1"));
  EXPECT_TRUE(is_loopback_host("::1"));
  EXPECT_TRUE(is_loopback_host("localhost"));
  EXPECT_FALSE(is_loopback_host("10.0.0.1"));
  EXPECT_FALSE(is_loopback_host("example"));
  EXPECT_EQ(local_address_towards("127.0.0.1"), "127.0.0.1");
}

TEST(HostAddress, BracketsAreThoseOfUrls) {
  EXPECT_EQ(without_brackets("[::1]"), "::1");
  EXPECT_EQ(without_brackets("::1"), "::1");
  EXPECT_EQ(without_brackets("host[1]"), "host[1]");
  EXPECT_EQ(without_brackets(""), "");
}

TEST(HostAddress, OfAnInterfaceIsANumber) {
  EXPECT_EQ(address_of_interface("lo"), "127.0.0.1");
  EXPECT_EQ(address_of_interface("no-such-interface"), "");
}

bool has_other_than_loopback() {
  ifaddrs* list = nullptr;
  EXPECT_EQ(getifaddrs(&list), 0);
  bool found = false;
  for (const ifaddrs* entry = list; entry; entry = entry->ifa_next) {
    constexpr unsigned kWanted = IFF_UP | IFF_RUNNING;
    const bool has_address = entry->ifa_addr && entry->ifa_addr->sa_family == AF_INET;
    found |= has_address && (entry->ifa_flags & (kWanted | IFF_LOOPBACK)) == kWanted;
  }
  freeifaddrs(list);
  return found;
}

TEST(HostAddress, ForOthersIsNoLoopbackWhereThereIsAnotherInterface) {
  if (!has_other_than_loopback()) GTEST_SKIP() << "this machine has loopback only";
  EXPECT_FALSE(is_loopback_host(outward_address())) << outward_address();
}

TEST(HostAddress, ForOthersIsANumber) {
  const auto addresses = resolve_host(outward_address(), std::chrono::milliseconds(1000));
  ASSERT_EQ(addresses.size(), 1U);
  EXPECT_EQ(addresses[0].text, outward_address());
}

}  // namespace host_address_test
}  // namespace lockstep
