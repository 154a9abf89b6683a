#include "lockstep/comm/shared_memory/fd_handover.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <future>
#include <thread>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/comm/shared_memory/memory.h"
#include "tests/support/file_limit.h"
#include "tests/support/run_ranks.h"

namespace lockstep::shm {
namespace fd_handover_test {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::FileLimit;
using test::in_child;
using test::Outcome;
using test::outcome_of;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

constexpr seconds kPatience{20};

UniqueFd unconnected() {
  return UniqueFd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
}

std::pair<sockaddr_un, socklen_t> address_of(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

/// Whether it reached who hands out under that name.
bool connect_to(const std::string& name, const UniqueFd& fd) {
  const auto [address, length] = address_of(name);
  return connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0;
}

/// What rank 1 says, or another number in its place.
std::string hello(char rank = 1) {
  std::string bytes(232, '\0');
  bytes[0] = rank;
  return bytes;
}

/// Whether a process that says this gets nothing.
bool is_refused(const std::string& name, const std::string& said) {
  const UniqueFd fd = unconnected();
  if (!connect_to(name, fd)) return false;
  send(fd.get(), said.data(), said.size(), MSG_NOSIGNAL);
  char byte = 0;
  return recv(fd.get(), &byte, 1, 0) <= 0;
}

/// Rank 0 of a group, handing out on a thread of its own.
class Host {
 public:
  explicit Host(int size, milliseconds timeout = kPatience) {
    thread_ = std::thread([this, size, timeout] {
      outcome_ = outcome_of([&] {
        hand_out(
            memory_.get(), size, timeout, "test",
            [this](const std::string& told) { name_.set_value(told); },
            [](int, const std::string&) {});
      });
    });
    name = name_.get_future().get();
  }
  ~Host() {
    if (thread_.joinable()) thread_.join();
  }
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  Outcome outcome() {
    thread_.join();
    return outcome_;
  }
  ino_t memory() const {
    struct stat status {};
    fstat(memory_.get(), &status);
    return status.st_ino;
  }

  std::string name;

 private:
  const UniqueFd memory_ = make_memory(4096, 4096);
  std::promise<std::string> name_;
  Outcome outcome_;
  std::thread thread_;
};

TEST(FdHandover, ConnectionsThatSayNothingHoldUpNobody) {
  Host host(2);
  std::vector<UniqueFd> silent(20);
  for (auto& fd : silent) {
    fd = unconnected();
    ASSERT_TRUE(connect_to(host.name, fd));
  }
  const auto before = Clock::now();
  const UniqueFd received = receive(host.name, 1, kPatience, "test");
  EXPECT_LT(Clock::now() - before, seconds(2)) << "as long as one of them was waited for";
  struct stat status {};
  ASSERT_EQ(fstat(received.get(), &status), 0);
  EXPECT_EQ(status.st_ino, host.memory());
  EXPECT_TRUE(host.outcome().ok());
}

TEST(FdHandover, OnlyARankThatIsStillToComeIsServed) {
  Host host(3);
  for (const auto& said : {std::string("x"), hello(0), hello(3), hello(-1)})
    EXPECT_TRUE(is_refused(host.name, said));
  EXPECT_FALSE(is_refused(host.name, hello(1)));
  EXPECT_TRUE(is_refused(host.name, hello(1))) << "a rank comes once";
  EXPECT_FALSE(is_refused(host.name, hello(2)));
  EXPECT_TRUE(host.outcome().ok());
}

TEST(FdHandover, TheTimeOutEndsItWhoeverConnects) {
  const auto begin = Clock::now();
  Host host(4, milliseconds(300));
  std::atomic<bool> stop = false;
  std::thread stranger([&] {
    while (!stop) connect_to(host.name, unconnected());
  });
  const Outcome outcome = host.outcome();
  EXPECT_LT(Clock::now() - begin, seconds(5));
  stop = true;
  stranger.join();
  EXPECT_TRUE(outcome.is<TimeoutError>());
  EXPECT_THAT(outcome.text(), HasSubstr("ranks 1, 2, 3 did not come within 0.3 s"));
}

TEST(FdHandover, WithoutADescriptorLeftRankZeroSaysSo) {
  Host host(2);
  const UniqueFd fd = unconnected();
  const FileLimit none(0);
  ASSERT_TRUE(connect_to(host.name, fd));
  const Outcome outcome = host.outcome();
  EXPECT_TRUE(outcome.is<SystemError>()) << outcome.text();
}

TEST(FdHandover, WithoutADescriptorLeftARankSaysSo) {
  Host host(2);
  const std::string text = in_child([&] {
    const FileLimit its_socket_only(1);
    receive(host.name, 1, kPatience, "test");
  });
  EXPECT_THAT(text, AllOf(HasSubstr("Too many open files"), HasSubstr("ulimit -n")));
}

TEST(FdHandover, ARankZeroThatEndsBeforeItAnswersIsLost) {
  // Before the others connect, and after.
  for (const int accepts : {0, 1}) {
    const std::string name = "lockstep-" + std::to_string(getpid()) + "-4711";
    UniqueFd listener = unconnected();
    const auto [address, length] = address_of(name);
    ASSERT_EQ(bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length), 0);
    ASSERT_EQ(listen(listener.get(), 4), 0);
    std::thread ends([&] {
      for (int i = 0; i < accepts; ++i) {
        const UniqueFd connection(accept(listener.get(), nullptr, nullptr));
        std::string said(232, 0);
        recv(connection.get(), said.data(), said.size(), 0);
        listener.reset();
      }
    });
    if (accepts == 0) listener.reset();
    const Outcome outcome = outcome_of([&] { receive(name, 1, kPatience, "test"); });
    ends.join();
    EXPECT_TRUE(outcome.is<PeerLostError>()) << outcome.text();
  }
}

TEST(FdHandover, ARankThatIsClosedOutOnceConnectsAgain) {
  const std::string name = "lockstep-" + std::to_string(getpid()) + "-4711";
  const UniqueFd listener = unconnected();
  const auto [address, length] = address_of(name);
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length), 0);
  ASSERT_EQ(listen(listener.get(), 4), 0);
  for (const int closed_out : {1, 2}) {
    std::thread rank_zero([&] {
      for (int i = 0; i < closed_out; ++i) UniqueFd(accept(listener.get(), nullptr, nullptr));
      if (closed_out == 1) UniqueFd(accept(listener.get(), nullptr, nullptr)).release();
    });
    const Outcome outcome = outcome_of([&] { receive(name, 1, milliseconds(300), "test"); });
    rank_zero.join();
    // The second connection stays open, and so is waited for.
    EXPECT_EQ(outcome.is<TimeoutError>(), closed_out == 1) << outcome.text();
    EXPECT_TRUE(outcome.is<CommError>()) << outcome.text();
  }
}

TEST(FdHandover, OtherUsersAreRefusedOnBothSides) {
  if (geteuid() != 0) GTEST_SKIP() << "needs the right to become another user";
  constexpr uid_t kOther = 65533;
  Host host(2);
  const std::string rank = in_child([&] {
    if (seteuid(kOther) == 0) receive(host.name, 1, kPatience, "test");
  });
  EXPECT_THAT(rank, HasSubstr("rank 0 runs as user 0, rank 1 as user 65533"));
  const std::string stranger = in_child([&] {
    if (seteuid(kOther) == 0 && is_refused(host.name, hello())) throw Error("refused");
  });
  EXPECT_EQ(stranger, "refused");
  EXPECT_FALSE(is_refused(host.name, hello())) << "for this user";
  EXPECT_TRUE(host.outcome().ok());
}

TEST(Mapping, IsOfWholeMemoryThatNobodyCanShorten) {
  const UniqueFd memory = make_memory(8192, 0);
  EXPECT_NE(Mapping(memory.get(), 8192).data(), nullptr);
  EXPECT_THROW(Mapping(memory.get(), 4096), CommError);
  EXPECT_THROW(Mapping(memory.get(), 16384), CommError);
  const UniqueFd unsealed(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(unsealed.get(), 8192), 0);
  EXPECT_THROW(Mapping(unsealed.get(), 8192), CommError);
}

}  // namespace fd_handover_test
}  // namespace lockstep::shm
