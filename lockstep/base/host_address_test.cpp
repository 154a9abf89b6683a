#include "lockstep/base/host_address.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

TEST(HostAddress, KnowsLoopback) {
  EXPECT_TRUE(is_loopback_host("127.0.1.1"));
  EXPECT_TRUE(is_loopback_host("::1"));
  EXPECT_TRUE(is_loopback_host("localhost"));
  EXPECT_FALSE(is_loopback_host("10.0.0.1"));
  EXPECT_FALSE(is_loopback_host("example"));
  EXPECT_EQ(local_address_towards("127.0.0.1"), "127.0.0.1");
}

TEST(HostAddress, OfAnInterfaceIsANumber) {
  EXPECT_EQ(address_of_interface("lo"), "127.0.0.1");
  EXPECT_EQ(address_of_interface("no-such-interface"), "");
}

TEST(HostAddress, ForOthersIsANumber) {
  const auto addresses = resolve_host(outward_address(), std::chrono::milliseconds(1000));
  ASSERT_EQ(addresses.size(), 1U);
  EXPECT_EQ(addresses[0].text, outward_address());
}

}  // namespace
}  // namespace lockstep
