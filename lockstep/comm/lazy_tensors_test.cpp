// Tensors whose memory does not hold their values: lazily conjugated or negated ones, and zeros
// without memory. By backend: taken by those that copy, else refused before anything is sent. (mpi:
// mpi_collectives_test.cpp.)
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "tests/support/lazy_tensors.h"
#include "tests/support/run_group.h"

namespace lockstep {
namespace lazy_tensors_test {

using test::Laziness;
using test::run_group;

class LazyTensors : public ::testing::TestWithParam<test::RankOptions> {};

TEST_P(LazyTensors, ConjugatedOnesTravelByTheirValues) {
  run_group(
      3, [](ProcessGroup group) { test::take_lazy_tensors(group, Laziness::conjugated); },
      GetParam());
}

TEST_P(LazyTensors, NegatedOnesTravelByTheirValues) {
  run_group(
      3, [](ProcessGroup group) { test::take_lazy_tensors(group, Laziness::negated); }, GetParam());
}

TEST_P(LazyTensors, ZerosWithoutMemoryAreGivenAndNotTaken) {
  run_group(3, test::take_zeros_without_memory, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Backends, LazyTensors,
                         ::testing::Values(test::RankOptions{.backend = "shm"},
                                           test::RankOptions{.backend = "hierarchical",
                                                             .hosts = "aab"}),
                         [](const auto& backend) { return backend.param.backend; });

TEST(LazyTensorsOverGloo, AreRefused) {
  run_group(2, [](ProcessGroup group) {
    const int peer = 1 - group.rank();
    at::Tensor plain = at::ones({4}), negated = at::_neg_view(at::ones({4}));
    at::Tensor conjugated = at::ones({4}, at::kComplexFloat).conj();
    at::Tensor zeros = at::_efficientzerotensor({4}, at::kFloat);
    std::vector<at::Tensor> outputs = {at::ones({4}), at::ones({4})};
    EXPECT_THROW(group.all_reduce(negated), UsageError);
    EXPECT_THROW(group.all_reduce(conjugated), UsageError);
    EXPECT_THROW(group.broadcast(zeros, 0), UsageError);
    EXPECT_THROW(group.all_gather(outputs, negated), UsageError);
    EXPECT_THROW(group.send(conjugated, peer), UsageError);
    EXPECT_THROW(group.recv(negated, peer), UsageError);
    group.all_reduce(plain);
    EXPECT_EQ(plain.sum().item<float>(), 8) << "nothing was sent";
  });
}

}  // namespace lazy_tensors_test
}  // namespace lockstep
