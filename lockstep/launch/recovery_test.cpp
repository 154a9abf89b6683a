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
  EXPECT_TRUE(recovery_.go_on_without(5));
  EXPECT_EQ(members_after(0), (std::vector<int>{4, 6}));
  EXPECT_TRUE(recovery_.go_on_without(4));
  EXPECT_EQ(members_after(1), (std::vector<int>{6}));
  EXPECT_EQ(newest(), 2);
  EXPECT_FALSE(folder_.has_after(2));
  EXPECT_FALSE(recovery_.go_on_without(6)) << "nobody is left";
  EXPECT_EQ(newest(), 2);
}

TEST_F(RecoveryTest, NobodyGoesOnUnlessAllOthersCan) {
  announce({4});
  EXPECT_FALSE(recovery_.go_on_without(5));
  EXPECT_FALSE(folder_.has_after(0));
  announce({6});
  EXPECT_TRUE(recovery_.go_on_without(5));
}

TEST_F(RecoveryTest, ANewProcessJoinsOnceItHasComeInItsOldPlace) {
  announce({4, 5, 6});
  ASSERT_TRUE(recovery_.go_on_without(4));
  folder_.forget(4);
  recovery_.expect(4);
  recovery_.admit();
  EXPECT_EQ(newest(), 1);
  announce({4});
  recovery_.admit();
  EXPECT_EQ(members_after(1), (std::vector<int>{4, 5, 6}));
  EXPECT_TRUE(recovery_.expected().empty());
}

TEST_F(RecoveryTest, ANewProcessThatFailsBeforeItHasComeChangesNothing) {
  announce({4, 5, 6});
  ASSERT_TRUE(recovery_.go_on_without(4));
  folder_.forget(4);
  recovery_.expect(4);
  EXPECT_TRUE(recovery_.go_on_without(4));
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

}  // namespace recovery_test
}  // namespace lockstep::launch
