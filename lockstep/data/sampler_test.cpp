#include "lockstep/data/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "tests/support/message_of.h"

namespace lockstep {
namespace sampler_test {

using test::message_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// What Python's DistributedSampler gives is checked for many options by tests/interop/data_test.py;
// the figures here were printed by Python's torch 2.13 once and keep the order from changing
// unnoticed where there is no Python.
TEST(DistributedSampler, GivesPythonsOrder) {
  // list(DistributedSampler(range(10), 2, 1, seed=3)) after set_epoch(2)
  const DistributedSampler sampler({.dataset_size = 10, .rank = 1, .world_size = 2, .seed = 3});
  EXPECT_THAT(sampler.indices(2), ElementsAre(4, 6, 5, 2, 7));
}

TEST(DistributedSampler, PadsWithTheFirstSamples) {
  const SamplerOptions options{.dataset_size = 5, .world_size = 3, .shuffle = false};
  std::vector<std::vector<int64_t>> parts;
  std::vector<int64_t> padding;
  for (int rank = 0; rank < 3; ++rank) {
    SamplerOptions own = options;
    own.rank = rank;
    parts.push_back(DistributedSampler(own).indices(0));
    padding.push_back(DistributedSampler(own).padding());
  }
  EXPECT_THAT(parts, ElementsAre(ElementsAre(0, 3), ElementsAre(1, 4), ElementsAre(2, 0)));
  EXPECT_THAT(padding, ElementsAre(0, 0, 1));
}

TEST(DistributedSampler, FillsAWorldLargerThanTheData) {
  std::vector<int64_t> first;
  std::vector<int64_t> padding;
  for (int rank = 0; rank < 7; ++rank) {
    const DistributedSampler sampler(
        {.dataset_size = 3, .rank = rank, .world_size = 7, .shuffle = false});
    ASSERT_EQ(sampler.samples_per_rank(), 1);
    first.push_back(sampler.indices(0).at(0));
    padding.push_back(sampler.padding());
  }
  EXPECT_THAT(first, ElementsAre(0, 1, 2, 0, 1, 2, 0));
  EXPECT_THAT(padding, ElementsAre(0, 0, 0, 1, 1, 1, 1));
}

TEST(DistributedSampler, SharesAnewWhatIsLeftOfAnEpoch) {
  const SamplerOptions options{.dataset_size = 20, .seed = 3};
  const auto order = DistributedSampler(options).indices(5);
  std::vector<int64_t> used;
  SamplerOptions own = options;
  for (const auto& [ranks, steps] : {std::pair(2, 3), std::pair(3, 2), std::pair(1, 8)}) {
    own.skip = used.size();
    own.world_size = ranks;
    for (int step = 0; step < steps; ++step) {
      for (own.rank = 0; own.rank < ranks; ++own.rank)
        used.push_back(DistributedSampler(own).indices(5).at(static_cast<size_t>(step)));
    }
  }
  EXPECT_EQ(used, order) << "each once, in the order of one process";
  own.rank = 0;
  own.skip = 20;
  EXPECT_THAT(DistributedSampler(own).indices(5), IsEmpty());
  EXPECT_EQ(DistributedSampler(own).padding(), 0);
  own.skip = 22;  // With the padding of another number of ranks.
  EXPECT_THAT(DistributedSampler(own).indices(5), IsEmpty());
  own.skip = -1;
  EXPECT_THROW(DistributedSampler{own}, UsageError);
}

TEST(DistributedSampler, DropLastLeavesNoneForAWorldLargerThanTheData) {
  const DistributedSampler sampler({.dataset_size = 3, .world_size = 4, .drop_last = true});
  EXPECT_EQ(sampler.samples_per_rank(), 0);
  EXPECT_EQ(sampler.padding(), 0);
  EXPECT_THAT(sampler.indices(0), IsEmpty());
}

TEST(DistributedSampler, WithoutPaddingEverySampleIsCountedOnce) {
  for (int64_t size : {1, 2, 3, 7, 16, 100, 101}) {
    for (int world : {1, 2, 3, 4, 7, 16, 150}) {
      std::vector<int64_t> seen;
      for (int rank = 0; rank < world; ++rank) {
        const DistributedSampler sampler(
            {.dataset_size = size, .rank = rank, .world_size = world, .seed = 5});
        std::vector<int64_t> own = sampler.indices(1);
        ASSERT_EQ(static_cast<int64_t>(own.size()), sampler.samples_per_rank());
        own.resize(own.size() - sampler.padding());
        seen.insert(seen.end(), own.begin(), own.end());
      }
      std::sort(seen.begin(), seen.end());
      std::vector<int64_t> expected(size);
      std::iota(expected.begin(), expected.end(), 0);
      EXPECT_EQ(seen, expected) << size << " samples, " << world << " ranks";
    }
  }
}

TEST(DistributedSampler, EpochsDifferAndRepeat) {
  const DistributedSampler sampler({.dataset_size = 1000});
  EXPECT_EQ(sampler.indices(4), sampler.indices(4));
  EXPECT_NE(sampler.indices(4), sampler.indices(5));
  const DistributedSampler next_seed({.dataset_size = 1000, .seed = 1});
  EXPECT_EQ(sampler.indices(5), next_seed.indices(4)) << "the generator's seed is seed + epoch";
}

TEST(DistributedSampler, ResumesInTheMiddleOfAnEpoch) {
  const DistributedSampler sampler({.dataset_size = 101, .rank = 2, .world_size = 3});
  const std::vector<int64_t> whole = sampler.indices(6);
  for (int64_t position : {0, 1, 17, 33, 34}) {
    const std::vector<int64_t> rest = sampler.indices({.epoch = 6, .position = position});
    EXPECT_EQ(rest, std::vector<int64_t>(whole.begin() + position, whole.end()));
  }
}

TEST(DistributedSampler, NamesWhatIsOutOfRange) {
  const auto make = [](SamplerOptions options) {
    return message_of([&] { DistributedSampler sampler(options); });
  };
  EXPECT_THAT(make({.dataset_size = 0}), HasSubstr("data set of 0 samples"));
  EXPECT_THAT(make({.dataset_size = 5, .world_size = 0}), HasSubstr("world of 0 ranks"));
  EXPECT_THAT(make({.dataset_size = 5, .rank = 2, .world_size = 2}),
              HasSubstr("rank 2, expected one from 0 to 1"));
  EXPECT_THAT(make({.dataset_size = 5, .rank = -1}), HasSubstr("rank -1"));
  const DistributedSampler sampler({.dataset_size = 5});
  for (int64_t position : {-1, 6})
    EXPECT_THAT(message_of([&] { sampler.indices({.epoch = 2, .position = position}); }),
                HasSubstr("position " + std::to_string(position) + " of epoch 2"));
}

}  // namespace sampler_test
}  // namespace lockstep
