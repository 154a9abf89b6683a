// A store that goes silent, as one whose process is stopped: its connections stand.
#include "lockstep/comm/checks/limited_tcp_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/socket.h"
#include "lockstep/comm/checks/call_signature.h"
#include "lockstep/comm/checks/check_context.h"
#include "lockstep/comm/checks/rank_checks.h"
#include "lockstep/comm/native_store.h"
#include "lockstep/comm/store.h"

namespace lockstep {
namespace limited_tcp_store_test {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// A port that leads to a store's. While it is held nothing passes.
class Passage {
 public:
  explicit Passage(uint16_t target)
      : listener_(listen_on("127.0.0.1", 0)), thread_([this, target] { run(target); }) {}
  ~Passage() {
    end_ = true;
    thread_.join();
  }
  Passage(const Passage&) = delete;
  Passage& operator=(const Passage&) = delete;

  uint16_t port() const { return bound_port(listener_.get()); }
  void hold(bool held) { held_ = held; }

 private:
  static constexpr milliseconds kSlice{2};

  struct Pair {
    UniqueFd near, far;
  };

  void run(uint16_t target) {
    for (std::vector<Pair> pairs; !end_;) {
      if (UniqueFd near = accept_from(listener_.get(), kSlice))
        pairs.push_back({std::move(near), connect_to("127.0.0.1", target, seconds(20))});
      if (held_) continue;
      std::erase_if(pairs, [](const Pair& pair) {
        return !pass(pair.near.get(), pair.far.get()) || !pass(pair.far.get(), pair.near.get());
      });
    }
  }

  /// What has come; false when it was the end.
  static bool pass(int from, int to) {
    std::array<char, 4096> bytes{};
    const ssize_t got = recv(from, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got > 0) send(to, bytes.data(), static_cast<size_t>(got), MSG_NOSIGNAL);
    return got != 0;
  }

  const UniqueFd listener_;
  std::atomic<bool> held_{false}, end_{false};
  std::thread thread_;
};

class SilentStore : public ::testing::Test {
 protected:
  /// As the least limit is a second.
  Store client(milliseconds timeout = seconds(1)) {
    return tcp_store({.port = passage_.port(), .timeout = timeout});
  }
  Store server_ = tcp_store({.is_listener = true});
  Passage passage_{tcp_store_port(server_)};
};

TEST_F(SilentStore, ARequestEndsInTimeAndTheConnectionIsNotUsedAgain) {
  Store store = client();
  EXPECT_EQ(store.add("number", 3), 3);
  passage_.hold(true);
  auto started = Clock::now();
  try {
    store.add("number", 1);
    ADD_FAILURE() << "nobody answered";
  } catch (const TimeoutError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("add of 'number'"), HasSubstr("gave no answer"),
                                    HasSubstr("1 s"), HasSubstr("stopped")));
  }
  EXPECT_LT(Clock::now() - started, seconds(10));
  // Its answer comes after all, and would be that of the next request.
  passage_.hold(false);
  EXPECT_THROW(store.add("another", 100), TimeoutError);
  EXPECT_THROW(store.check({"number"}), TimeoutError);
  EXPECT_EQ(server_.add("another", 0), 0);
}

TEST_F(SilentStore, AConnectionThatIsNotAnsweredEndsInTime) {
  passage_.hold(true);
  const auto started = Clock::now();
  EXPECT_THROW(client(), CommError);
  EXPECT_LT(Clock::now() - started, seconds(10));
  passage_.hold(false);
}

// As a rank that holds the store and is stopped while the first calls are compared.
TEST_F(SilentStore, AComparisonOfCallsEndsInTime) {
  const Store shared = client();
  CheckContext context(native_store(shared), 1, 2, RankNames{}, "default", seconds(1));
  RankChecks checks(context, RankChecks::kAll);
  passage_.hold(true);
  const auto started = Clock::now();
  try {
    checks.compare(CallSignature{}, seconds(1));
    ADD_FAILURE() << "nobody answered";
  } catch (const PeerLostError& error) {
    EXPECT_TRUE(error.failure().has(Failure::Kind::store_lost)) << error.what();
  }
  EXPECT_LT(Clock::now() - started, seconds(10));
}

// As Python's store, and one that serves other ranks.
TEST_F(SilentStore, APlainStoreAndAServerGetAConnectionOfTheirOwn) {
  c10d::TCPStoreOptions options;
  options.port = tcp_store_port(server_);
  options.waitWorkers = false;
  const c10::intrusive_ptr<c10d::Store> plain = c10::make_intrusive<c10d::PrefixStore>(
      "outer", c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options));
  const auto limited = limited_store(plain, seconds(5));
  EXPECT_NE(dynamic_cast<const LimitedTcpStore*>(tcp_store_of(limited)), nullptr);
  limited->set("key", std::string("value"));
  EXPECT_EQ(plain->get_to_str("key"), "value");
  const auto serves = native_store(server_);
  EXPECT_NE(limited_store(serves, seconds(5)), serves);
  const auto ours = native_store(client(seconds(2)));
  EXPECT_EQ(limited_store(ours, seconds(5)), ours);
  EXPECT_NE(limited_store(ours, seconds(1)), ours);
}

}  // namespace limited_tcp_store_test
}  // namespace lockstep
