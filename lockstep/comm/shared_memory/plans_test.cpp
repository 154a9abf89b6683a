// Collectives without tensors; ranks are threads. Also run under ThreadSanitizer (tests/tsan).
#include "lockstep/comm/shared_memory/plans.h"

#include <gtest/gtest.h>

#include <future>
#include <numeric>
#include <random>

#include "tests/support/messages_world.h"

namespace lockstep::shm {
namespace plans_test {

using messages_world::PlainCall;
using messages_world::World;
using test::expect_ok;
using test::run_ranks;

constexpr std::chrono::milliseconds kLimit{20'000};

std::byte* bytes_of(std::vector<int32_t>& numbers) {
  return reinterpret_cast<std::byte*>(numbers.data());
}
const std::byte* bytes_of(const std::vector<int32_t>& numbers) {
  return reinterpret_cast<const std::byte*>(numbers.data());
}

template <class Part>
void on_all_ranks(World& world, int size, const Part& part) {
  expect_ok(run_ranks(size, [&](int rank) { part(rank, world.group(rank)); }));
}

void run(SharedGroup& group, const char* name, Plan plan) {
  const PlainCall call(name, 1);
  start(group, call, plan);
  finish(group, call, plan, kLimit, Waiter::caller);
}

class Plans : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Plans, ::testing::Values(2, 3, 5));

/// In turn with some of `counts` of numbers.
void expect_every_collective_moves_what_it_shall(World& world, int size,
                                                 const std::vector<size_t>& counts, int rounds) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  const auto kernel = reduce_kernel(DataType::i32, Reduction::sum);
  on_all_ranks(world, size, [&](int rank, SharedGroup& group) {
    std::mt19937_64 random(seed);
    const auto numbers = [](int of, size_t count, int salt) {
      std::vector<int32_t> values(count);
      std::iota(values.begin(), values.end(), of * 1000 + salt);
      return values;
    };
    for (int round = 0; round < rounds; ++round) {
      const size_t count = counts[random() % counts.size()];
      const int root = static_cast<int>(random() % static_cast<uint64_t>(size));
      const auto n = static_cast<size_t>(size);

      auto sum = numbers(rank, count, round);
      run(group, "all_reduce", all_reduce_plan(group, bytes_of(sum), count * 4, kernel));
      for (size_t i = 0; i < count; ++i) {
        const int wanted = size * (round + static_cast<int>(i)) + 500 * size * (size - 1);
        ASSERT_EQ(sum[i], wanted) << "all_reduce of " << count << ", element " << i;
      }

      auto given = numbers(rank, count, round);
      run(group, "broadcast", broadcast_plan(group, bytes_of(given), count * 4, root));
      ASSERT_EQ(given, numbers(root, count, round));

      std::vector<std::vector<int32_t>> all(n, std::vector<int32_t>(count));
      std::vector<std::byte*> targets;
      for (auto& one : all) targets.push_back(bytes_of(one));
      const auto mine = numbers(rank, count, round);
      run(group, "all_gather", all_gather_plan(group, bytes_of(mine), count * 4, targets));
      for (int r = 0; r < size; ++r)
        ASSERT_EQ(all[static_cast<size_t>(r)], numbers(r, count, round));

      std::vector<const std::byte*> sources(targets.begin(), targets.end());
      std::vector<int32_t> part(count);
      run(group, "scatter",
          scatter_plan(group, rank == root ? sources : std::vector<const std::byte*>(),
                       bytes_of(part), count * 4, root));
      ASSERT_EQ(part, numbers(rank, count, round));

      run(group, "reduce_scatter",
          reduce_scatter_plan(group, sources, bytes_of(part), count * 4, kernel));
      for (size_t i = 0; i < count; ++i)
        ASSERT_EQ(part[i], size * (rank * 1000 + round + static_cast<int>(i)));

      const PlainCall call("all_to_all", 1);
      const auto length = [&](int from, int to) {
        return static_cast<size_t>(from * 3700 + to) * 4;
      };
      std::vector<std::vector<int32_t>> sent, received;
      Buffers from, to;
      for (int other = 0; other < size; ++other) {
        sent.push_back(numbers(rank, length(rank, other) / 4, other));
        received.emplace_back(length(other, rank) / 4);
      }
      for (int other = 0; other < size; ++other) {
        from.push_back({bytes_of(sent[static_cast<size_t>(other)]), length(rank, other)});
        to.push_back({bytes_of(received[static_cast<size_t>(other)]), length(other, rank)});
      }
      run(group, "all_to_all", all_to_all_plan(group, call, from, to, kLimit));
      for (int other = 0; other < size; ++other)
        ASSERT_EQ(received[static_cast<size_t>(other)],
                  numbers(other, length(other, rank) / 4, rank));
      run(group, "barrier", sequence_plan({}));
    }
  });
}

TEST_P(Plans, EveryCollectiveMovesWhatItShall) {
  World world(GetParam());  // Slots of 4 KiB: a thousand numbers.
  expect_every_collective_moves_what_it_shall(world, GetParam(), {0, 1, 3, 1023, 1024, 1025, 9001},
                                              40);
}

TEST_P(Plans, EveryCollectiveDoesSoInLargeSlots) {
  const size_t slot = 64 << 10;
  World world(GetParam(), 64 << 10, slot);
  expect_every_collective_moves_what_it_shall(
      world, GetParam(), {2048, slot / 4, slot / 4 + 1, slot - 3, 100'003}, 10);
}

TEST_P(Plans, ReducesInARegionWhereTheDataLies) {
  const int size = GetParam();
  constexpr size_t kCount = 20'011, kOffset = 128;
  World world(size);
  std::promise<std::string> name;
  const std::shared_future<std::string> told = name.get_future().share();
  const Meeting meeting{[&](const std::string& value) { name.set_value(value); },
                        [&] { return told.get(); }};
  on_all_ranks(world, size, [&](int rank, SharedGroup& group) {
    const Region region({rank, size, kLimit, "0", {}}, kOffset + kCount * 4, meeting);
    auto* numbers = reinterpret_cast<int32_t*>(region.mine() + kOffset);
    for (int round = 0; round < 20; ++round) {
      for (size_t i = 0; i < kCount; ++i)
        numbers[i] = rank * 1000 + round + static_cast<int32_t>(i);
      run(group, "all_reduce",
          all_reduce_plan(group, region, kOffset, kCount * 4,
                          reduce_kernel(DataType::i32, Reduction::sum)));
      for (size_t i = 0; i < kCount; ++i)
        ASSERT_EQ(numbers[i], size * (round + static_cast<int>(i)) + 500 * size * (size - 1));
    }
  });
}

TEST_P(Plans, LateRanksSleepersAndSpinnersKeepStep) {
  const int size = GetParam();
  World world(size);
  on_all_ranks(world, size, [&](int rank, SharedGroup& group) {
    for (int round = 0; round < 300; ++round) {
      // Some come late, so that the others sleep.
      if (round % 50 == rank) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      std::vector<int32_t> one{round};
      run(group, "all_reduce",
          all_reduce_plan(group, bytes_of(one), 4, reduce_kernel(DataType::i32, Reduction::sum)));
      ASSERT_EQ(one[0], size * round);
    }
  });
}

}  // namespace plans_test
}  // namespace lockstep::shm
