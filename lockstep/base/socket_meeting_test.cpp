// How two ends of a connection get to know each other, among strangers.
#include "lockstep/base/socket_meeting.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <future>

#include "lockstep/base/error.h"
#include "lockstep/base/socket.h"
#include "tests/support/message_of.h"
#include "tests/support/test_wait.h"

namespace lockstep {
namespace socket_meeting_test {

using namespace std::chrono_literals;
using lockstep::test::message_of;
using test_wait::wait_until;
using ::testing::HasSubstr;

UniqueFd connect_at(const std::string& address) {
  const size_t space = address.find(' ');
  return connect_to(address.substr(0, space),
                    static_cast<uint16_t>(std::stoi(address.substr(space + 1))), 10s);
}

void write_to(const UniqueFd& connection, const std::string& text) {
  ASSERT_EQ(send(connection.get(), text.data(), text.size(), MSG_NOSIGNAL), text.size());
}

std::string read_from(const UniqueFd& connection, size_t bytes) {
  std::string text;
  bool is_over = false;
  wait_until(
      [&] {
        char byte = 0;
        const ssize_t got = recv(connection.get(), &byte, 1, MSG_DONTWAIT);
        if (got == 1) text += byte;
        is_over = got == 0 || (got < 0 && errno != EAGAIN);
        return is_over || text.size() == bytes;
      },
      "the other end's words");
  return text;
}

/// What a member says first.
std::string hello_as(int64_t rank) {
  const uint64_t magic = 0x6c6f636b6d656574;
  return std::string(reinterpret_cast<const char*>(&magic), 8) +
         std::string(reinterpret_cast<const char*>(&rank), 8) + std::string(32, 'n');
}
constexpr size_t kHelloBytes = 48, kProofBytes = 32;

SocketMeetingOptions options_of(int self, int size) {
  SocketMeetingOptions options{.self = self, .names = {}, .key = "the key"};
  for (int other = 0; other < size; ++other)
    options.names.push_back("member " + std::to_string(other));
  return options;
}

// The called end shows its proof first. So one without the key has to be found by a caller that
// does not look.
TEST(SocketMeeting, TheCalledEndTakesNobodyWithoutTheKey) {
  SocketMeeting zero(options_of(0, 2)), one(options_of(1, 2));
  const std::vector<std::string> addresses{zero.listen("127.0.0.1"), one.listen("127.0.0.1")};
  auto meets = std::async(std::launch::async, [&] { return zero.connect(addresses, 60s, {}); });
  for (const int64_t rank : {1, 0, 2}) {
    const UniqueFd stranger = connect_at(addresses[0]);
    write_to(stranger, hello_as(rank));
    EXPECT_EQ(read_from(stranger, kHelloBytes + kProofBytes).size(),
              rank == 1 ? kHelloBytes + kProofBytes : 0);
    if (rank == 1) write_to(stranger, std::string(kProofBytes, 'x'));
    EXPECT_EQ(read_from(stranger, 1), "") << "it hangs up";
  }
  const auto peers = one.connect(addresses, 60s, {});
  EXPECT_TRUE(peers[0].connection);
  EXPECT_TRUE(meets.get()[1].connection);
  write_to(peers[0].connection, "message");
}

/// A member 0 whose answers a test gives by hand, and member 1's meeting with it, of `size`
/// members, on a thread of its own.
struct MemberZero {
  std::future<std::vector<MetPeer>> meet(int size, std::function<void()> look) {
    const std::string address = "127.0.0.1 " + std::to_string(bound_port(listener.get()));
    return std::async(std::launch::async, [address, size, look] {
      SocketMeeting meeting(options_of(1, size));
      meeting.listen("127.0.0.1");
      return meeting.connect({address}, 60s, [look](const auto&) { look(); });
    });
  }
  UniqueFd listener = listen_on("127.0.0.1", 0);
};

// Member 2 never comes: to wait for it would take a minute, and end by another error.
TEST(SocketMeeting, ACallToAStrangerEndsTheWaitForOthers) {
  MemberZero zero;
  auto meets = zero.meet(3, [] {});
  const UniqueFd caller = accept_from(zero.listener.get(), 20s);
  write_to(caller, hello_as(0) + std::string(kProofBytes, 'x'));
  EXPECT_THAT(message_of<CommError>([&] { meets.get(); }),
              HasSubstr("does not answer as a member"));
}

// A member 0 that is stopped says nothing: the end of the meeting does not wait for it.
TEST(SocketMeeting, WhatFailsHereEndsACallThatWaits) {
  MemberZero zero;
  std::atomic<bool> fails{false};
  auto meets = zero.meet(2, [&] {
    if (fails) throw CommError("member 2 has failed");
  });
  const UniqueFd silent = accept_from(zero.listener.get(), 20s);
  EXPECT_EQ(read_from(silent, kHelloBytes).size(), kHelloBytes);
  fails = true;
  EXPECT_EQ(meets.wait_for(15s), std::future_status::ready) << "it waits for its minute";
  EXPECT_THAT(message_of<CommError>([&] { meets.get(); }), HasSubstr("member 2 has failed"));
}

}  // namespace socket_meeting_test
}  // namespace lockstep
