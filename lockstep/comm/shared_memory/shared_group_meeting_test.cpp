#include "lockstep/comm/shared_memory/shared_group.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <future>
#include <string>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/process_identity.h"
#include "tests/support/file_limit.h"
#include "tests/support/run_ranks.h"

namespace lockstep::shm {
namespace shared_group_meeting_test {

using test::FileLimit;
using test::in_child;
using test::Outcome;
using test::outcome_of;
using ::testing::HasSubstr;

SharedGroupOptions options_of(int rank, std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  SharedGroupOptions options;
  options.rank = rank;
  options.size = 2;
  options.timeout = timeout;
  return options;
}

/// Rank 1 is told this.
Outcome joins(const std::string& told) {
  return outcome_of([&] { SharedGroup(options_of(1), {{}, [&] { return told; }}); });
}

TEST(SharedGroupMeeting, WhoIsWaitedForIsLookedAfter) {
  SharedGroupOptions options = options_of(0);
  options.look = [](const std::vector<int>& missing) {
    EXPECT_EQ(missing, std::vector<int>{1});
    throw PeerLostError("rank 1 has ended");
  };
  const Meeting meeting{[](const std::string&) {}, {}};
  EXPECT_THROW(SharedGroup(options, meeting), PeerLostError);
}

TEST(SharedGroupMeeting, WhoHasComeSeesThatRankZeroGaveUp) {
  SharedGroupOptions options = options_of(0);
  options.size = 3;
  std::promise<std::string> told;
  std::atomic<bool> gives_up{false};
  options.look = [&](const std::vector<int>&) {
    if (!gives_up) return;
    constexpr auto kEnded = Failure::Kind::ended;
    throw PeerLostError("rank 2 has ended", {}, {.kind = kEnded, .ranks = {{2, kEnded}}});
  };
  std::thread first([&] {
    EXPECT_THROW(SharedGroup(options, {[&](const std::string& text) { told.set_value(text); }, {}}),
                 PeerLostError);
  });
  SharedGroupOptions second = options_of(1);
  second.size = 3;
  const std::string text = told.get_future().get();
  const SharedGroup segment(second, {{}, [&] { return text; }});
  EXPECT_EQ(segment.record(0).state.load(), RankState::joined);
  gives_up = true;
  first.join();
  EXPECT_EQ(segment.record(0).state.load(), RankState::left);
  EXPECT_EQ(segment.record(0).caused.load(), 1u);
  const auto cause = read_failure(segment.record(0).cause);
  EXPECT_TRUE(cause && cause->concerns(2));
}

TEST(SharedGroupMeeting, TheTimeOutEndsBothSides) {
  const std::chrono::milliseconds soon(50);
  const Meeting alone{[](const std::string&) {}, [] { return std::string(); }};
  SharedGroupOptions options = options_of(0, soon);
  options.names = {4, 7};
  const Outcome first = outcome_of([&] { SharedGroup(options, alone); });
  EXPECT_TRUE(first.is<TimeoutError>()) << first.text();
  EXPECT_TRUE(first.failure().concerns(7));
  EXPECT_TRUE(outcome_of([&] { SharedGroup(options_of(1, soon), alone); }).is<TimeoutError>());
}

TEST(SharedGroupMeeting, OnlyTheMemoryOfRankZeroIsTaken) {
  EXPECT_TRUE(joins("none").is<CommError>());
  EXPECT_TRUE(joins("3 another namespace").is<UsageError>());
  const UniqueFd other(memfd_create("test", MFD_CLOEXEC));
  EXPECT_TRUE(joins(std::to_string(other.get()) + " " + process_identity()).is<CommError>());
  EXPECT_TRUE(joins("9999 " + process_identity()).is<PeerLostError>());
}

TEST(SharedGroupMeeting, ARankZeroThatGaveUpAndUsesTheDescriptorForASocketIsLost) {
  const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_TRUE(joins(std::to_string(socket.get()) + " " + process_identity()).is<PeerLostError>());
}

TEST(SharedGroupMeeting, WithoutADescriptorItSaysSo) {
  std::promise<std::string> name;
  std::thread first([&] {
    const Outcome outcome = outcome_of([&] {
      SharedGroup(options_of(0, std::chrono::milliseconds(200)),
              {[&](const std::string& told) { name.set_value(told); }, {}});
    });
    EXPECT_TRUE(outcome.is<TimeoutError>()) << outcome.text();
  });
  const std::string told = name.get_future().get();
  {
    const FileLimit none(0);
    try {
      SharedGroup(options_of(1), {{}, [&] { return told; }});
      ADD_FAILURE() << "joined without a descriptor";
    } catch (const SystemError& error) {
      EXPECT_EQ(error.errno_value(), EMFILE) << error.what();
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    EXPECT_TRUE(outcome_of([] { SharedGroup(options_of(0), {}); }).is<SystemError>());
  }
  first.join();
}

TEST(SharedGroupMeeting, OtherUsersAreRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "needs the right to become another user";
  const std::string refused = in_child([] {
    const UniqueFd memory(memfd_create("test", MFD_CLOEXEC));
    const std::string told = std::to_string(memory.get()) + " " + process_identity();
    const std::string error = in_child([&] {
      if (setresuid(65533, 65533, 65533) == 0) SharedGroup(options_of(1), {{}, [&] { return told; }});
    });
    throw Error(error);
  });
  EXPECT_THAT(refused, HasSubstr("runs as another user"));
}

}  // namespace shared_group_meeting_test
}  // namespace lockstep::shm
