#include "lockstep/launch/recovery.h"

#include <gtest/gtest.h>

#include "lockstep/base/file.h"

namespace lockstep::launch {
namespace recovery_test {

class RecoveryTest : public testing::Test {
 protected:
  void announce(std::initializer_list<int> workers) {
    for (const int worker : workers) folder_.announce(worker);
  }
  std::vector<int> members_after(int64_t number) const {
    const auto newest = folder_.newest_after(number);
    return newest ? newest->members : std::vector<int>{};
  }
  int64_t newest() const {
    const auto newest = folder_.newest_after(0);
    return newest ? newest->number : 0;
  }

  TemporaryDirectory directory_;
  GenerationFolder folder_{directory_.path()};
  Recovery recovery_{directory_.path(), {4, 5, 6}};
};

TEST_F(RecoveryTest, TheOthersGoOnWithoutOneThatFailed) {
  announce({4, 5, 6});
  EXPECT_FALSE(folder_.has_after(0));
  EXPECT_TRUE(recovery_.go_on_without(5, false));
  EXPECT_EQ(members_after(0), (std::vector<int>{4, 6}));
  EXPECT_TRUE(recovery_.go_on_without(4, false));
  EXPECT_EQ(members_after(1), (std::vector<int>{6}));
  EXPECT_EQ(newest(), 2);
  EXPECT_FALSE(folder_.has_after(2));
  EXPECT_FALSE(recovery_.go_on_without(6, false)) << "nobody is left";
  EXPECT_EQ(newest(), 2);
}

TEST_F(RecoveryTest, NobodyGoesOnUnlessAllOthersCan) {
  announce({4});
  EXPECT_FALSE(recovery_.go_on_without(5, false));
  EXPECT_FALSE(folder_.has_after(0));
  announce({6});
  EXPECT_TRUE(recovery_.go_on_without(5, false));
}

TEST_F(RecoveryTest, ANewProcessJoinsOnceItHasComeInItsOldPlace) {
  announce({4, 5, 6});
  ASSERT_TRUE(recovery_.go_on_without(4, false));
  folder_.forget(4);
  recovery_.expect(4);
  recovery_.admit();
  EXPECT_EQ(newest(), 1);
  announce({4});
  recovery_.admit();
  EXPECT_EQ(members_after(1), (std::vector<int>{4, 5, 6}));
  EXPECT_TRUE(recovery_.expected().empty());
}

TEST_F(RecoveryTest, WhoAreTooFewWaitForANewProcess) {
  for (const int worker : {4, 5, 6}) folder_.announce(worker, {3});
  ASSERT_TRUE(recovery_.go_on_without(5, true));
  EXPECT_TRUE(recovery_.waits());
  EXPECT_TRUE(folder_.is_promised(1));
  EXPECT_FALSE(folder_.has_after(0));
  folder_.forget(5);
  recovery_.expect(5);
  EXPECT_TRUE(recovery_.go_on_without(4, true)) << "one more while they wait";
  folder_.forget(4);
  recovery_.expect(4);
  folder_.announce(5, {3});
  recovery_.admit();
  EXPECT_FALSE(folder_.has_after(0)) << "two are too few";
  folder_.announce(4, {3});
  recovery_.admit();
  EXPECT_EQ(members_after(0), (std::vector<int>{4, 5, 6}));
  EXPECT_FALSE(recovery_.waits());
  EXPECT_FALSE(recovery_.go_on_without(6, false)) << "nobody comes";
  EXPECT_EQ(newest(), 1);
}

TEST_F(RecoveryTest, WhoDoesNotLeaveWithTheOthersHangs) {
  announce({4, 5, 6});
  const std::chrono::steady_clock::time_point now{};
  EXPECT_TRUE(recovery_.hanging(now).empty());
  folder_.leave(4, 0);
  EXPECT_TRUE(recovery_.hanging(now).empty()) << "it may come yet";
  folder_.leave(6, 0);
  EXPECT_EQ(recovery_.hanging(now + Recovery::kSettle), std::set<int>{5});
  ASSERT_TRUE(recovery_.go_on_without(5, false));
  EXPECT_TRUE(recovery_.hanging(now + 2 * Recovery::kSettle).empty()) << "a new generation";
}

TEST_F(RecoveryTest, ANewProcessThatFailsBeforeItHasComeChangesNothing) {
  announce({4, 5, 6});
  ASSERT_TRUE(recovery_.go_on_without(4, false));
  folder_.forget(4);
  recovery_.expect(4);
  EXPECT_TRUE(recovery_.go_on_without(4, false));
  EXPECT_EQ(newest(), 1);
  EXPECT_TRUE(recovery_.expected().empty());
}

TEST_F(RecoveryTest, WhoIsDoneIsNotWaitedFor) {
  announce({4, 5, 6});
  recovery_.ended(4);
  EXPECT_EQ(members_after(0), (std::vector<int>{5, 6}));
  recovery_.ended(5);
  recovery_.ended(6);
  EXPECT_FALSE(recovery_.has_members());
  EXPECT_EQ(newest(), 2) << "nobody is left to be told";
}

TEST_F(RecoveryTest, WorkersThatAnnouncedNothingAreToldNothing) {
  recovery_.ended(4);
  recovery_.ended(5);
  EXPECT_FALSE(folder_.has_after(0));
}

TEST_F(RecoveryTest, WorkersOfAHostGoOnInTheGenerationsOfAllHosts) {
  const HostGeneration first{
      .number = 7, .first_rank = 4, .world_size = 9, .master_addr = "::1", .master_port = 29'400};
  HostRecovery hosts(directory_.path(), {4, 5, 6}, first);
  const auto begin = folder_.first();
  EXPECT_EQ(begin.members, (std::vector<int>{4, 5, 6}));
  ASSERT_TRUE(begin.of_hosts);
  EXPECT_EQ(begin.of_hosts->number, 7);
  EXPECT_EQ(begin.of_hosts->first_rank, 4);
  EXPECT_EQ(begin.of_hosts->world_size, 9);
  EXPECT_EQ(begin.of_hosts->master_addr, "::1");
  EXPECT_EQ(begin.of_hosts->master_port, 29'400);

  const HostRecovery::Time now{};
  HostGeneration next = first;
  next.number = 9;
  EXPECT_FALSE(hosts.follow(next, now)) << "nobody has announced itself";
  EXPECT_FALSE(hosts.go_on_without(5));
  announce({4, 6});
  folder_.announce(5, {9, 12});
  EXPECT_TRUE(hosts.go_on_without(4));
  EXPECT_TRUE(folder_.is_promised(1));
  next.world_size = 6;
  EXPECT_FALSE(hosts.follow(next, now)) << "with which 5 does not go on";
  next.world_size = 12;
  EXPECT_EQ(hosts.follow(next, now), std::set<int>{4});
  EXPECT_FALSE(folder_.has_announced(4)) << "a new process does so itself";
  EXPECT_EQ(members_after(0), (std::vector<int>{4, 5, 6}));
  EXPECT_EQ(folder_.newest_after(0)->of_hosts->number, 9);

  EXPECT_TRUE(hosts.go_on_without(6)) << "while the new process starts";
  EXPECT_EQ(hosts.follow(next, now), std::set<int>{6});
  folder_.join(5, 2);
  EXPECT_TRUE(hosts.hanging(now + HostRecovery::kJoin - std::chrono::seconds(1)).empty());
  EXPECT_EQ(hosts.hanging(now + HostRecovery::kJoin), (std::set<int>{4, 6}));
  EXPECT_TRUE(hosts.go_on_without(4) && hosts.go_on_without(6));
  EXPECT_FALSE(hosts.go_on_without(5)) << "none is left";
}

TEST_F(RecoveryTest, WhoDoesNotLeaveWithOthersOfItsHostHangs) {
  HostRecovery hosts(directory_.path(), {4, 5, 6}, {.world_size = 9});
  announce({4, 5, 6});
  const HostRecovery::Time now{};
  folder_.leave(4, 0);
  EXPECT_TRUE(hosts.hanging(now).empty());
  folder_.leave(6, 0);
  EXPECT_TRUE(hosts.hanging(now + HostRecovery::kSettle - std::chrono::seconds(1)).empty())
      << "the hosts may agree yet";
  EXPECT_EQ(hosts.hanging(now + HostRecovery::kSettle), std::set<int>{5});
  ASSERT_TRUE(hosts.follow({.number = 1, .world_size = 9}, now));
  EXPECT_TRUE(hosts.hanging(now + HostRecovery::kSettle).empty()) << "a new generation";
}

}  // namespace recovery_test
}  // namespace lockstep::launch
