// How the ranks of a job get their link, in real processes.
#include "lockstep/rpc/fast_meeting.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <chrono>
#include <future>
#include <stdexcept>
#include <thread>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/socket.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/world.h"
#include "lockstep/launch/spawn.h"
#include "tests/support/file_limit.h"
#include "tests/support/test_wait.h"

namespace lockstep::rpc::detail {
namespace fast_meeting_test {

using namespace std::chrono_literals;
using test_wait::wait_until;

// It has said that it can share memory, and then has no descriptor left for it.
TEST(FastMeeting, ARankThatFailsLateHoldsNobodyUp) {
  spawn(
      [](int rank) {
        const World world = init(InitOptions{});
        Store store = prefix_store("meeting", world.store().clone());
        store.set_timeout(60s);
        const auto begin = std::chrono::steady_clock::now();
        if (rank == 1) {
          Store other = store.clone();
          std::thread meets([&] { EXPECT_THROW(meet(store, {.rank = 1, .size = 3}), CommError); });
          other.wait({numbered_keys("fast/wish/", 3)[1]});
          const lockstep::test::FileLimit none(0);
          other.set("is_poor", "");
          meets.join();
        } else {
          store.get("is_poor");
          EXPECT_THROW(meet(store, {.rank = rank, .size = 3}), CommError);
        }
        EXPECT_LT(std::chrono::steady_clock::now() - begin, 40s) << "it waited for the time-out";
        if (::testing::Test::HasFailure()) throw std::runtime_error("an expectation failed");
      },
      3);
}

std::shared_ptr<FastLink> meet_as(const Store& store, int rank, const std::string& secret) {
  return meet(store.clone(),
              {.rank = rank, .size = 2, .shared_memory = false, .secret = secret, .job = "job"});
}

UniqueFd connect_at(const std::string& address) {
  const size_t space = address.find(' ');
  return connect_to(address.substr(0, space),
                    static_cast<uint16_t>(std::stoi(address.substr(space + 1))), 10s);
}

void write_to(const UniqueFd& connection, const std::string& text) {
  ASSERT_EQ(send(connection.get(), text.data(), text.size(), MSG_NOSIGNAL), text.size());
}

TEST(FastMeeting, AnotherSecretGetsNoConnection) {
  Store store = hash_store();
  auto other =
      std::async(std::launch::async, [&] { return meet_as(store, 1, "another secret!!"); });
  EXPECT_THROW(meet_as(store, 0, "sixteen letters!"), CommError);
  EXPECT_THROW(other.get(), CommError);
}

TEST(FastMeeting, StrangersKeepNobodyOut) {
  if (env_string("LOCAL_RANK")) return;  // A worker that a later test has started passes by.
  Store store = hash_store();
  auto first = std::async(std::launch::async, [&] { return meet_as(store, 0, ""); });
  store.set("fast/wish/1", "TCP");  // So it listens before the other comes.
  const std::string address = store.get("fast/TCP/address/0");
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 100; ++i) {
    UniqueFd stranger = connect_at(address);
    if (i > 0) write_to(stranger, std::string(i % 2 == 0 ? 5 : 200, 'x'));
    if (i == 0 || i % 2 == 1) strangers.push_back(std::move(stranger));  // The first is silent.
  }
  const auto second = meet_as(store, 1, "");
  const auto made = first.get();
  ASSERT_NE(made, nullptr);
  ASSERT_NE(second, nullptr);
  EXPECT_TRUE(made->send(1, {}, "text"));
  wait_until([&] { return second->look(); }, "the message");
}

}  // namespace fast_meeting_test
}  // namespace lockstep::rpc::detail
