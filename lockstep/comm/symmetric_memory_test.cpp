// ProcessGroup::symmetric_empty: all_reduce where the data lies gives what it gives elsewhere.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <random>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "tests/support/run_group.h"

namespace lockstep {
namespace symmetric_memory_test {

using test::run_group;

uint64_t seed_of_run() {
  if (const auto given = env_string("LOCKSTEP_TEST_SEED")) return std::stoull(*given);
  return std::random_device()();
}

at::Tensor random_values(std::mt19937_64& random, int64_t count, at::ScalarType type) {
  std::vector<double> values(static_cast<size_t>(count));
  std::uniform_real_distribution<double> uniform(-50, 50);
  for (double& value : values) value = uniform(random);
  return at::tensor(values, at::kDouble).to(type);
}

class SymmetricMemory : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, SymmetricMemory, ::testing::Values(1, 2, 3, 4, 7));

TEST_P(SymmetricMemory, AllReduceHasTheBitsOfOrdinaryTensors) {
  const uint64_t seed = seed_of_run();
  SCOPED_TRACE("LOCKSTEP_TEST_SEED=" + std::to_string(seed));
  run_group(GetParam(),
            [&](ProcessGroup group) {
              std::mt19937_64 random(seed + static_cast<uint64_t>(group.rank()));
              std::mt19937_64 same(seed);  // What all ranks choose alike.
              for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kInt,
                                      at::kLong, at::kByte, at::kBool}) {
                const at::Tensor memory = group.symmetric_empty(300'001, type);
                EXPECT_EQ(memory.scalar_type(), type);
                for (const int64_t count : {0, 1, 17, 8'192, 8'193, 70'000, 300'001}) {
                  const int64_t most = memory.numel() - count;
                  const int64_t begin =
                      static_cast<int64_t>(same() % static_cast<uint64_t>(most + 1));
                  at::Tensor part = memory.narrow(0, begin, count);
                  at::Tensor plain = random_values(random, count, type);
                  part.copy_(plain);
                  const ReduceOp op =
                      type != at::kBool && same() % 2 == 0 ? ReduceOp::avg : ReduceOp::max;
                  group.all_reduce(plain, op);
                  if (same() % 2 == 0) {
                    group.all_reduce(part, op);
                  } else {
                    group.all_reduce_async(part, op).wait();
                  }
                  ASSERT_TRUE(at::equal(part, plain)) << type << ", " << count << " from " << begin;
                }
              }
            },
            {.backend = "shm"});
}

TEST_P(SymmetricMemory, ReduceScatterHasTheBitsOfOrdinaryTensors) {
  run_group(GetParam(),
            [&](ProcessGroup group) {
              std::mt19937_64 random(static_cast<uint64_t>(group.rank()));
              for (const int64_t each : {1, 40, 9'000, 70'001}) {
                for (const auto type : {at::kFloat, at::kBFloat16, at::kLong}) {
                  const int64_t count = each * group.size();
                  const at::Tensor memory = group.symmetric_empty(count + 64, type);
                  const at::Tensor part = memory.narrow(0, 64, count);
                  const at::Tensor plain = random_values(random, count, type);
                  part.copy_(plain);
                  at::Tensor expected = at::empty({each}, type), got = at::empty({each}, type);
                  group.reduce_scatter_tensor(expected, plain);
                  group.reduce_scatter_tensor_async(got, part).wait();
                  ASSERT_TRUE(at::equal(got, expected)) << type << ", " << each;
                  EXPECT_TRUE(at::equal(part, plain));
                  // Where the output is a part of it as well, others still read what was there.
                  at::Tensor within = memory.narrow(0, 64, each);
                  group.reduce_scatter_tensor(within, part);
                  ASSERT_TRUE(at::equal(within, expected)) << type << ", " << each;
                }
              }
            },
            {.backend = "shm"});
}

TEST(SymmetricMemories, IsAnOrdinaryTensorElsewhere) {
  run_group(2, [](ProcessGroup group) {
    at::Tensor memory = group.symmetric_empty(100'000, at::kFloat);
    memory.fill_(group.rank() + 1);
    group.all_reduce(memory);
    EXPECT_EQ(memory[99'999].item<float>(), 3);
    EXPECT_THROW(group.symmetric_empty(-1, at::kFloat), UsageError);
  });
}

TEST(SymmetricMemories, OtherPartsOrOtherMemoryOnTheRanksIsAMismatch) {
  run_group(2,
            [](ProcessGroup group) {
              const at::Tensor memory = group.symmetric_empty(200'000, at::kFloat);
              const auto refused = [&](at::Tensor tensor) {
                EXPECT_THROW(group.all_reduce(tensor), MismatchError);
              };
              refused(memory.narrow(0, 1000 * group.rank(), 100'000));
              refused(group.rank() == 0 ? memory : at::zeros_like(memory));
              // The group goes on.
              at::Tensor again = memory;
              again.fill_(1);
              group.all_reduce(again);
              EXPECT_EQ(again[7].item<float>(), 2);
            },
            {.backend = "shm"});
}

TEST(SymmetricMemories, OtherArgumentsOrAnotherCallOnARankAreAMismatchOnAll) {
  const auto refused = [](const ProcessGroup& group, const char* told, auto call) {
    try {
      call();
      ADD_FAILURE() << "accepted on rank " << group.rank();
    } catch (const MismatchError& error) {
      EXPECT_THAT(error.what(),
                  ::testing::MatchesRegex("ranks 0 and 1 called symmetric_empty of float32 "
                                          "\\[1000\\].*" +
                                          std::string(told) + ".*"));
    }
  };
  run_group(3,
            [&](ProcessGroup group) {
              const bool last = group.rank() == 2;
              refused(group, "rank 2 called symmetric_empty of float32 \\[1000000\\]",
                      [&] { group.symmetric_empty(last ? 1'000'000 : 1000, at::kFloat); });
              refused(group, "rank 2 called symmetric_empty of int32 \\[1000\\]",
                      [&] { group.symmetric_empty(1000, last ? at::kInt : at::kFloat); });
              refused(group, "rank 2 called barrier", [&] {
                last ? group.barrier() : (void)group.symmetric_empty(1000, at::kFloat);
              });
              // The group goes on.
              at::Tensor memory = group.symmetric_empty(100'000, at::kFloat);
              memory.fill_(1);
              group.all_reduce(memory);
              EXPECT_EQ(memory.sum().item<float>(), 300'000);
            },
            {.backend = "shm"});
}

TEST(SymmetricMemories, ARankThatLeavesInsteadIsNamed) {
  for (const int leaver : {0, 1, 2}) {
    run_group(3,
              [&](ProcessGroup group) {
                if (group.rank() == leaver) return;
                try {
                  at::Tensor memory = group.symmetric_empty(1000, at::kFloat);
                  group.all_reduce(memory);  // Those that were handed the memory fail here.
                  ADD_FAILURE() << "rank " << group.rank() << " went on without " << leaver;
                } catch (const PeerLostError& error) {
                  EXPECT_TRUE(error.failure().concerns(leaver)) << error.what();
                }
              },
              {.backend = "shm"});
  }
}

TEST(SymmetricMemories, IsReleasedWithItsLastTensorAndMayOutliveTheGroup) {
  const auto mappings = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/map_files"), {});
  };
  const auto descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  std::vector<at::Tensor> kept(2);
  const auto made = [&](int times) {
    run_group(2,
              [&](ProcessGroup group) {
                for (int i = 0; i < times; ++i) {
                  at::Tensor memory = group.symmetric_empty(50'000, at::kFloat);
                  memory.fill_(i + group.rank());
                  group.all_reduce(memory);
                  kept[static_cast<size_t>(group.rank())] = memory;
                }
              },
              {.backend = "shm"});
  };
  made(2);
  const auto mapped = mappings(), open = descriptors();
  made(200);
  // Threads come and go with mappings of their own.
  EXPECT_LT(mappings(), mapped + 50);
  EXPECT_LE(descriptors(), open + 2);
  EXPECT_EQ(kept[0].sum().item<float>(), 50'000 * 399.0F);
}

}  // namespace symmetric_memory_test
}  // namespace lockstep
