#include "lockstep/comm/process_group.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/comm/test_ranks.h"

namespace lockstep {
namespace {
using lockstep::testing::run_ranks;

TEST(ProcessGroup, AllReduce) {
  run_ranks(2, [](ProcessGroup group) {
    at::Tensor t = at::full({3}, group.rank() + 1.0);
    group.all_reduce(t);
    EXPECT_TRUE(at::equal(t, at::full({3}, 3.0)));
  });
}
}  // namespace
}  // namespace lockstep
