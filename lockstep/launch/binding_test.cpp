#include "lockstep/launch/binding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"

namespace lockstep::launch {
namespace binding_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::ThrowsMessage;
using ::testing::UnorderedElementsAreArray;

/// Cores of two hardware threads each: core i has the processors i and cores + i, as Linux numbers
/// them.
Topology machine(int cores, int domains) {
  Topology topology{.online = 2 * cores};
  for (int i = 0; i < cores; ++i) topology.cores.push_back({{i, cores + i}, i * domains / cores});
  return topology;
}

BindingRequest request(const std::string& word, int rank, int size) {
  BindingRequest result;
  result.word = word;
  result.local_rank = rank;
  result.local_size = size;
  return result;
}

std::vector<int> processors(const std::string& word, int rank, int size, const Topology& topology) {
  return choose_binding(request(word, rank, size), topology).processors;
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
  auto topology = machine(1, 1);
  topology.online = 16;
  EXPECT_THAT([&] { choose_binding(request("core", 0, 2), topology); },
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
  EXPECT_THAT(choose_binding(request("auto", 0, 2), one).reason, HasSubstr("one NUMA domain"));
  EXPECT_THAT(choose_binding(request("auto", 0, 1), two).reason, HasSubstr("one rank"));
}

TEST(Binding, AutoLeavesWhatALauncherHasDealtOut) {
  auto topology = machine(4, 2);
  topology.online = 16;
  const auto binding = choose_binding(request("auto", 0, 2), topology);
  EXPECT_THAT(binding.processors, IsEmpty());
  EXPECT_THAT(binding.reason, HasSubstr("8 of 16 processors"));
  // Asked for: among those that are left.
  EXPECT_EQ(choose_binding(request("core", 0, 2), topology).processors.size(), 4u);
}

TEST(Binding, NoneIsAsAskedFor) {
  EXPECT_THAT(choose_binding(request("none", 0, 2)).reason, HasSubstr("asked for"));
}

TEST(Binding, AnUnknownWordIsNamed) {
  EXPECT_THAT([] { choose_binding(request("cores", 0, 1)); },
              ThrowsMessage<UsageError>(HasSubstr("did you mean 'core'")));
}

TEST(Binding, TheKernelShowsCoresAndDomains) {
  const TemporaryDirectory system("lockstep-binding");
  // Two cores of two threads in each domain; the domains' numbers have a gap.
  for (const int processor : {0, 1, 2, 3, 4, 5, 6, 7}) {
    const auto folder = system.path() / ("cpu" + std::to_string(processor));
    std::filesystem::create_directories(folder / (processor % 2 == 0 ? "node8" : "node2"));
    std::filesystem::create_directories(folder / "topology");
    const int first = processor % 4;
    write_file_atomically(folder / "topology" / "thread_siblings_list",
                          std::to_string(first) + "," + std::to_string(first + 4) + "\n");
  }
  const auto topology = read_topology({0, 1, 2, 4, 5, 6, 7}, system.path());
  std::vector<std::pair<std::vector<int>, int>> cores;
  for (const Core& core : topology.cores) cores.emplace_back(core.processors, core.numa);
  EXPECT_THAT(cores, ElementsAre(Pair(ElementsAre(1, 5), 0), Pair(ElementsAre(7), 0),
                                 Pair(ElementsAre(0, 4), 1), Pair(ElementsAre(2, 6), 1)));
  EXPECT_EQ(topology.domains(), 2);
  const auto unknown = read_topology({3, 5}, system.path() / "none");
  EXPECT_EQ(unknown.cores.size(), 2u);
  EXPECT_EQ(unknown.domains(), 1);
}

TEST(Binding, ThisMachinesCoresAreThoseThatWeMayUse) {
  const auto topology = read_topology();
  std::vector<int> all;
  for (const Core& core : topology.cores) {
    all.insert(all.end(), core.processors.begin(), core.processors.end());
  }
  EXPECT_THAT(all, UnorderedElementsAreArray(allowed_processors()));
  EXPECT_GE(topology.domains(), 1);
  EXPECT_LE(topology.processors(), topology.online);
}

}  // namespace binding_test
}  // namespace lockstep::launch
