// A rank that ends while a group forms: the others learn it at once, not at the time-out. Each test
// has one rank. The others' part is told to the store.
#include "lockstep/comm/forming_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/process_identity.h"
#include "lockstep/comm/checks/check_context.h"
#include "lockstep/comm/native_store.h"
#include "tests/support/ended_identity.h"
#include "tests/support/over_backends.h"
#include "tests/support/run_ranks.h"

namespace lockstep {
namespace forming_watch_test {

using Clock = std::chrono::steady_clock;
using std::chrono::seconds;
using test_process::ended_identity;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Lost when a key with `part` in it is used: to such keys only, or from then on to all.
class StoreLostAt final : public c10d::HashStore {
 public:
  StoreLostAt(std::string part, bool to_all) : part_(std::move(part)), to_all_(to_all) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    expect({key});
    HashStore::set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    expect({key});
    return HashStore::get(key);
  }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    expect({key});
    return HashStore::compareSet(key, expected, desired);
  }
  int64_t add(const std::string& key, int64_t value) override {
    expect({key});
    return HashStore::add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    expect(keys);
    return HashStore::check(keys);
  }

 private:
  void expect(const std::vector<std::string>& keys) {
    const bool is_part = keys.front().find(part_) != std::string::npos;
    if (is_part && to_all_) lost_ = true;
    if (is_part || lost_) throw std::system_error(ECONNRESET, std::system_category());
  }

  const std::string part_;
  const bool to_all_;
  std::atomic<bool> lost_{false};
};

class Forming : public test::OverBackends {
 protected:
  Forming() {
    options_.backend = GetParam();
    options_.hosts = GetParam() == "hierarchical" ? "ab" : "";
    options_.store = hash_store();
    options_.timeout = seconds(60);
    options_.store.set_timeout(options_.timeout);
  }
  /// Says that `rank` is this process, and has come.
  void announce(int rank, const std::string& identity) {
    Store own = prefix_store("lockstep/0", options_.store);
    own.set(check_part(kDefaultGroup) + "/" + check_prefix(kDefaultGroup) + "/" +
                announcement_key(rank),
            identity);
  }
  /// What forming a group of two as this rank throws; null for nothing.
  std::exception_ptr form(int rank) {
    try {
      form_group(test::test_context(rank, 2, options_), kDefaultGroup, {0, 1}, GetParam());
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }
  test::RankOptions options_;
};

TEST_P(Forming, ARankThatEndsIsNamedAtOnce) {
  const auto started = Clock::now();
  const std::string identity = ended_identity();
  for (const int rank : {0, 1}) {
    options_.store = hash_store();
    announce(1 - rank, identity);
    const test::Outcome outcome{form(rank)};
    EXPECT_TRUE(outcome.is<PeerLostError>()) << outcome.text();
    const Failure failure = outcome.failure();
    ASSERT_EQ(failure.ranks.size(), 1U) << outcome.text();
    EXPECT_TRUE(test::tells(failure, Failure::Kind::ended, 1 - rank));
    EXPECT_EQ(failure.ranks[0].process, process_number(identity));
  }
  EXPECT_LT(Clock::now() - started, seconds(30));
}

// As its own host tells it.
TEST_P(Forming, ARankThatEndsOnAnotherHostIsNamedAtOnce) {
  Store own = prefix_store("lockstep/0", options_.store);
  announce(1, "another boot,pid:[1] 4711 99");
  constexpr auto kEnded = Failure::Kind::ended;
  own.set("group/0/lost", encode(Failure{.kind = kEnded, .ranks = {{1, kEnded, 4711}}}));
  try {
    std::rethrow_exception(form(0));
  } catch (const PeerLostError& error) {
    EXPECT_EQ(error.failure().kind, kEnded);
    EXPECT_EQ(error.ranks(), std::vector<int>{1});
    EXPECT_EQ(error.failure().ranks.at(0).process, 4711);
  }
}

// It had all it needed, and its program was over.
TEST_P(Forming, ARankThatHasLeftIsNotWaitedForAndNoLoss) {
  options_.timeout = std::chrono::milliseconds(400);
  options_.store.set_timeout(options_.timeout);
  announce(1, ended_identity());
  prefix_store("lockstep/0", options_.store).set(leave_key(1), "1");
  const auto failure = form(0);
  EXPECT_THROW(std::rethrow_exception(failure), CommError);
  EXPECT_NO_THROW({
    try {
      std::rethrow_exception(failure);
    } catch (const PeerLostError&) {
      throw;
    } catch (const std::exception&) {
    }
  });
}

// A rank 0 that ends while a group forms takes the store with it.
TEST_P(Forming, AStoreThatIsLostIsALostPeer) {
  const auto started = Clock::now();
  for (const bool to_all : {false, true}) {
    options_.store = wrap_store(c10::make_intrusive<StoreLostAt>("/cpu/", to_all));
    const auto failure = form(1);
    ASSERT_TRUE(failure);
    try {
      std::rethrow_exception(failure);
    } catch (const PeerLostError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 1: forming the group '0' of 2 ranks failed"),
                                      HasSubstr(kPeerLostHint)));
    }
  }
  EXPECT_LT(Clock::now() - started, seconds(30));
}

// Before the backend has asked it for anything.
TEST_P(Forming, AStoreThatIsLostAtTheAnnouncementIsALostPeer) {
  options_.store = wrap_store(c10::make_intrusive<StoreLostAt>(announcement_key(1), true));
  const auto failure = form(1);
  ASSERT_TRUE(failure);
  EXPECT_THROW(std::rethrow_exception(failure), PeerLostError);
}

TEST_P(Forming, AMemberMayLeaveAsSoonAsItHasFormedAGroup) {
  for (int round = 0; round < 10; ++round) {
    test::RankOptions options;
    options.backend = GetParam();
    if (options.backend == "hierarchical") options.hosts = "aabb";
    test::run_group(
        4, [](ProcessGroup group) { EXPECT_EQ(group.split(0).size(), 4); }, options);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Forming, test::over_backends(), test::backend_name);

}  // namespace forming_watch_test
}  // namespace lockstep
