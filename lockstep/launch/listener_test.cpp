#include "lockstep/launch/listener.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "lockstep/base/error.h"

namespace lockstep::launch {
namespace {

sockaddr_in bound_address(const Listener& listener) {
  sockaddr_in address{};
  socklen_t size = sizeof address;
  getsockname(listener.socket.get(), reinterpret_cast<sockaddr*>(&address), &size);
  return address;
}

TEST(Listener, TakesAFreePortOnTheGivenAddressOnly) {
  const auto listener = listen_on("127.0.0.1", 0);
  EXPECT_GT(listener.port, 0);
  const auto address = bound_address(listener);
  EXPECT_EQ(ntohl(address.sin_addr.s_addr), INADDR_LOOPBACK);
  EXPECT_EQ(ntohs(address.sin_port), listener.port);
  const UniqueFd client(socket(AF_INET, SOCK_STREAM, 0));
  EXPECT_EQ(connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0)
      << "connections wait before anyone serves them";
}

TEST(Listener, ATakenPortIsNamed) {
  const auto first = listen_on("127.0.0.1", 0);
  try {
    listen_on("127.0.0.1", first.port);
    FAIL() << "nothing was thrown";
  } catch (const CommError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("127.0.0.1:" + std::to_string(first.port)), std::string::npos) << text;
    EXPECT_NE(text.find("in use"), std::string::npos) << text;
  }
}

TEST(Listener, ANameThatDoesNotResolveIsNamed) {
  try {
    listen_on("no-such-host.invalid", 0);
    FAIL() << "nothing was thrown";
  } catch (const CommError& error) {
    EXPECT_NE(std::string(error.what()).find("no-such-host.invalid"), std::string::npos);
  }
}

TEST(Listener, AnAddressOfAnotherMachineMeansAll) {
  const auto listener = listen_on("192.0.2.1", 0);  // reserved for documentation (RFC 5737)
  EXPECT_GT(listener.port, 0);
}

}  // namespace
}  // namespace lockstep::launch
