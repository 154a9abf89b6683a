#include "lockstep/comm/tensor_shard.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

namespace lockstep::tensor_shard_test {

/// Puts shards where they say that they belong.
void put(const std::vector<TensorShard>& shards, at::Tensor& whole) {
  for (const TensorShard& shard : shards) {
    at::Tensor part = whole;
    for (size_t d = 0; d < shard.offsets.size(); ++d) {
      const auto dim = static_cast<int64_t>(d);
      part = part.narrow(dim, shard.offsets[d], shard.values.size(dim));
    }
    part.copy_(shard.values);
  }
}

TEST(TensorShard, AnyTwoCutsMakeUpTheTensor) {
  for (const auto& sizes :
       std::vector<std::vector<int64_t>>{{}, {7}, {1, 6}, {4, 5}, {2, 3, 2, 5}}) {
    at::Tensor whole =
        at::arange(static_cast<int64_t>(c10::multiply_integers(sizes))).reshape(sizes);
    for (const bool last : {false, true}) {
      if (last && whole.dim() != 4) continue;
      if (last) whole = whole.contiguous(at::MemoryFormat::ChannelsLast);
      const at::Tensor flat = whole.as_strided({whole.numel()}, {1});
      for (int64_t a = 0; a <= whole.numel(); ++a) {
        for (int64_t b = a; b <= whole.numel(); ++b) {
          at::Tensor made = at::full(sizes, -1, at::kLong);
          const std::pair<int64_t, int64_t> ranges[] = {{0, a}, {a, b}, {b, whole.numel()}};
          for (const auto& [from, to] : ranges) {
            const auto shards = shards_of_range("w", whole, from, flat.narrow(0, from, to - from));
            const auto boxes = boxes_of_range(whole, from, to - from);
            ASSERT_EQ(boxes.size(), shards.size());
            for (size_t i = 0; i < boxes.size(); ++i) {
              EXPECT_EQ(boxes[i].offsets, shards[i].offsets);
              EXPECT_EQ(boxes[i].sizes, shards[i].values.sizes().vec());
            }
            put(shards, made);
          }
          ASSERT_TRUE(at::equal(made, whole)) << whole.sizes() << " cut at " << a << " and " << b;
        }
      }
    }
  }
}

TEST(TensorShard, WholeRowsAreOneBox) {
  const at::Tensor matrix = at::full({8, 16}, 0);
  EXPECT_EQ(boxes_of_range(matrix, 32, 64).size(), 1u);
  EXPECT_EQ(boxes_of_range(matrix, 40, 64).size(), 3u);
}

}  // namespace lockstep::tensor_shard_test
