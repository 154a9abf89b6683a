#include "lockstep/base/socket.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/base/host_address.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string refusal(const std::string& host, uint16_t port) {
  ListenOptions options;
  options.unknown_for = milliseconds(0);
  try {
    listen_on(host, port, options);
  } catch (const CommError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(ListenOn, TakesAFreePortOnTheGivenAddressOnly) {
  const UniqueFd listener = listen_on("127.0.0.1", 0);
  EXPECT_GT(bound_port(listener.get()), 0);
  EXPECT_EQ(numeric_text(local_name(listener.get())), "127.0.0.1");
  EXPECT_TRUE(connect_to("127.0.0.1", bound_port(listener.get()), milliseconds(10'000)))
      << "connections wait before anyone serves them";
  EXPECT_TRUE(is_loopback_host(bound_host(listen_on("localhost", 0).get())));
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
  const UniqueFd listener = listen_on(other, 0, options);
  EXPECT_TRUE(connect_to("127.0.0.1", bound_port(listener.get()), milliseconds(10'000)));
}

}  // namespace
}  // namespace lockstep
