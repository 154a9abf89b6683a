#include "lockstep/launch/binding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"

namespace lockstep::launch {
namespace binding_test {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

/// Cores of two hardware threads each: core i has the processors i and cores + i, as Linux numbers
/// them.
Topology machine(int cores, int domains) {
  Topology topology;
  for (int i = 0; i < cores; ++i) topology.cores.push_back({{i, cores + i}, i * domains / cores});
  return topology;
}

BindingRequest request(const std::string& word, int rank, int size) {
  BindingRequest result;
  result.word = word;
  result.local_rank = rank;
  result.local_size = size;
  result.allowed = result.online = 16;
  return result;
}

std::vector<int> processors(const std::string& word, int rank, int size, const Topology& topology) {
  return choose_binding(request(word, rank, size), &topology).processors;
}

TEST(Binding, CoresAreDealtOutInEqualParts) {
  const auto topology = machine(8, 2);
  EXPECT_EQ(processors("core", 0, 2, topology), (std::vector<int>{0, 1, 2, 3, 8, 9, 10, 11}));
  EXPECT_EQ(processors("core", 1, 2, topology), (std::vector<int>{4, 5, 6, 7, 12, 13, 14, 15}));
  EXPECT_EQ(processors("core", 7, 8, topology), (std::vector<int>{7, 15}));
}

TEST(Binding, NoCoreIsGivenTwiceOrToNobody) {
  for (int size = 1; size <= 7; ++size) {
    std::vector<int> all;
    for (int rank = 0; rank < size; ++rank) {
      const auto own = processors("core", rank, size, machine(7, 1));
      EXPECT_FALSE(own.empty());
      all.insert(all.end(), own.begin(), own.end());
    }
    std::sort(all.begin(), all.end());
    EXPECT_EQ(all.size(), 14u) << size;
    EXPECT_EQ(std::unique(all.begin(), all.end()), all.end()) << size;
  }
}

TEST(Binding, MoreRanksThanCoresIsAnError) {
  const auto topology = machine(2, 1);
  EXPECT_THAT([&] { processors("core", 2, 3, topology); },
              ThrowsMessage<UsageError>(HasSubstr("3 ranks, but 2 cores")));
}

TEST(Binding, ARankThatALauncherHasBoundIsTold) {
  auto bound = request("core", 0, 2);
  bound.allowed = 1;
  const auto topology = machine(1, 1);
  EXPECT_THAT([&] { choose_binding(bound, &topology); },
              ThrowsMessage<UsageError>(HasSubstr("mpirun --bind-to none")));
}

TEST(Binding, DomainsAreSharedOrDealtOut) {
  const auto topology = machine(8, 2);
  const std::vector<int> first = {0, 1, 2, 3, 8, 9, 10, 11};
  EXPECT_EQ(processors("numa", 0, 4, topology), first);
  EXPECT_EQ(processors("numa", 1, 4, topology), first);
  EXPECT_NE(processors("numa", 2, 4, topology), first);
  EXPECT_EQ(processors("numa", 0, 1, topology).size(), 16u);
  EXPECT_EQ(processors("numa", 0, 2, machine(8, 4)), first);
}

TEST(Binding, AutoBindsToDomainsOnly) {
  const auto one = machine(8, 1), two = machine(8, 2);
  EXPECT_EQ(processors("auto", 1, 2, two), processors("numa", 1, 2, two));
  EXPECT_THAT(processors("auto", 0, 2, one), IsEmpty());
  EXPECT_THAT(choose_binding(request("auto", 0, 2), &one).reason, HasSubstr("one NUMA domain"));
  EXPECT_THAT(choose_binding(request("auto", 0, 1), &two).reason, HasSubstr("one rank"));
}

TEST(Binding, AutoLeavesWhatALauncherHasDealtOut) {
  const auto topology = machine(4, 2);
  auto restricted = request("auto", 0, 2);
  restricted.allowed = 8;
  const auto binding = choose_binding(restricted, &topology);
  EXPECT_THAT(binding.processors, IsEmpty());
  EXPECT_THAT(binding.reason, HasSubstr("8 of 16 processors"));
  restricted.word = "core";  // Asked for: among those that are left.
  EXPECT_EQ(choose_binding(restricted, &topology).processors.size(), 4u);
}

TEST(Binding, WithoutTopologyOnlyWhatIsAskedForFails) {
  EXPECT_THAT(choose_binding(request("auto", 0, 2), nullptr).processors, IsEmpty());
  EXPECT_THROW(choose_binding(request("numa", 0, 2), nullptr), UsageError);
  EXPECT_THAT(choose_binding(request("none", 0, 2), nullptr).reason, HasSubstr("asked for"));
}

TEST(Binding, AutoNeedsNoTopologyOfOneDomain) {
  auto known = request("auto", 0, 2);
  known.one_domain = true;
  EXPECT_EQ(choose_binding(known, nullptr).reason, "none: one NUMA domain");
  const auto topology = machine(4, 1);
  known.word = "core";  // Needs it still.
  EXPECT_EQ(choose_binding(known, &topology).processors.size(), 4u);
  EXPECT_THROW(choose_binding(known, nullptr), UsageError);
}

TEST(Binding, AnUnknownWordIsNamed) {
  EXPECT_THAT([] { choose_binding(request("cores", 0, 1), nullptr); },
              ThrowsMessage<UsageError>(HasSubstr("did you mean 'core'")));
}

TEST(Binding, ThisMachinesCoresAreThoseThatWeMayUse) {
  const auto topology = read_topology();
  if (!topology) GTEST_SKIP() << no_topology_reason();
  std::vector<int> all;
  for (const Core& core : topology->cores) {
    all.insert(all.end(), core.processors.begin(), core.processors.end());
  }
  std::sort(all.begin(), all.end());
  EXPECT_EQ(all, allowed_processors());
  EXPECT_GE(topology->domains(), 1);
}

}  // namespace binding_test
}  // namespace lockstep::launch
