#include "lockstep/comm/backends/hierarchical/host_layout.h"

#include <gtest/gtest.h>

namespace lockstep::hierarchical {
namespace host_layout_test {

using Hosts = std::vector<std::vector<int>>;

TEST(HostLayout, HostsComeInTheOrderOfTheirLowestRanks) {
  const HostLayout layout = HostLayout::of({"b", "a", "b", "c", "a"}, 4);
  EXPECT_EQ(layout.hosts, (Hosts{{0, 2}, {1, 4}, {3}}));
  EXPECT_EQ(layout.host, 1);
  EXPECT_EQ(layout.local, 1);
  EXPECT_EQ(layout.size(), 5U);
  EXPECT_FALSE(layout.leads());
  EXPECT_EQ(layout.leaders(), (std::vector<int>{0, 1, 3}));
  EXPECT_EQ(layout.host_of[2], 0);
  EXPECT_EQ(layout.local_of(2), 1);
}

TEST(HostLayout, ARankThatCanShareWithNoneIsAHostOfItsOwn) {
  const HostLayout layout = HostLayout::of({"", "a", "", "a"}, 2);
  EXPECT_EQ(layout.hosts, (Hosts{{0}, {1, 3}, {2}}));
  EXPECT_EQ(layout.host, 2);
  EXPECT_TRUE(layout.leads());
}

TEST(HostLayout, KnowsWhenThereIsNoHierarchy) {
  EXPECT_TRUE(HostLayout::of({"a", "a"}, 1).one_host());
  EXPECT_FALSE(HostLayout::of({"a", "a"}, 1).one_rank_a_host());
  EXPECT_TRUE(HostLayout::of({"a", "b"}, 0).one_rank_a_host());
  EXPECT_FALSE(HostLayout::of({"a", "b"}, 0).one_host());
}

}  // namespace host_layout_test
}  // namespace lockstep::hierarchical
