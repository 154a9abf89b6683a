#include "lockstep/parallel/whole_model.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/support/over_backends.h"

namespace lockstep {
namespace sharded_clip_test {

using detail::clip_shards;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

class ShardedClip : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, ShardedClip, test::over_backends(), test::backend_name);

/// What LibTorch's norm says of all ranks' gradients together.
TEST_P(ShardedClip, ScalesByTheNormOverAllRanks) {
  for (const int ranks : {1, 2, 3}) {
    if (ranks == 1 && GetParam() == "hierarchical") continue;
    run_group(ranks, [&](const ProcessGroup& group) {
      const auto make = [&](int rank) {
        at::Tensor all = at::arange(20, at::kFloat).add(rank).sin();
        return std::vector<at::Tensor>{all.narrow(0, 0, 7), all.narrow(0, 7, 13)};
      };
      std::vector<at::Tensor> everyone;
      for (int rank = 0; rank < ranks; ++rank) {
        for (const at::Tensor& part : make(rank)) everyone.push_back(part.to(at::kDouble));
      }
      const double wanted = at::linalg_vector_norm(at::cat(everyone), 2.0).item<double>();
      const auto mine = make(group.rank());
      EXPECT_NEAR(clip_shards(mine, 0.5, group), wanted, 1e-6 * wanted);
      const auto before = make(group.rank());
      for (size_t i = 0; i < mine.size(); ++i)
        EXPECT_TRUE(at::allclose(mine[i], before[i] * (0.5 / wanted), 1e-5));
      // Small enough now: no bit changes.
      const at::Tensor kept = mine[1].clone();
      clip_shards(mine, 1, group);
      EXPECT_TRUE(at::equal(mine[1], kept));
    });
  }
}

TEST_P(ShardedClip, RanksWithoutGradientsAndOtherDtypes) {
  run_group(3, [](const ProcessGroup& group) {
    std::vector<at::Tensor> mine;
    if (group.rank() == 1)
      mine = {at::full({9}, 1.0, at::kDouble), at::full({16}, 1.0, at::kBFloat16)};
    EXPECT_DOUBLE_EQ(clip_shards(mine, 1, group), 5);
    for (const at::Tensor& gradient : mine) EXPECT_NEAR(gradient[0].item<double>(), 0.2, 1e-3);
  });
}

TEST_P(ShardedClip, ANormThatFloat16CannotHold) {
  run_group(2, [](const ProcessGroup& group) {
    const at::Tensor mine = at::full({8}, 32768.0, at::kHalf);
    EXPECT_NEAR(clip_shards({mine}, 65536, group), 131072, 0.1);  // float32 has 24 bits
    EXPECT_NEAR(mine[0].item<double>(), 16384, 16);
  });
}

TEST_P(ShardedClip, WhatIsNotFiniteOnOneRankIsKnownToAll) {
  run_group(2, [](const ProcessGroup& group) {
    for (const double bad : {kInfinity, std::nan("")}) {
      at::Tensor mine = at::ones({4});
      if (group.rank() == 1) mine[2] = bad;
      EXPECT_FALSE(std::isfinite(clip_shards({mine}, 1, group)));
      // As in Python: an infinity makes the others 0, a NaN makes them NaN.
      EXPECT_TRUE(std::isinf(bad) ? mine[0].item<float>() == 0 : std::isnan(mine[0].item<float>()));
    }
  });
}

}  // namespace sharded_clip_test
}  // namespace lockstep
