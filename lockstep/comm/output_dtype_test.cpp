// Outputs of another dtype than the inputs: refused by every backend before anything is sent, so
// that the group can still be used.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "tests/support/run_group.h"

namespace lockstep {
namespace {

using Tensors = std::vector<at::Tensor>;

Tensors one_each(const ProcessGroup& group, at::ScalarType dtype) {
  Tensors list;
  for (int rank = 0; rank < group.size(); ++rank) list.push_back(at::ones({4}, dtype));
  return list;
}

void refuses_other_outputs(const ProcessGroup& group) {
  const auto given = at::ones({4}, at::kFloat), all_given = at::ones({12}, at::kFloat);
  const auto inputs = one_each(group, at::kFloat);
  auto outputs = one_each(group, at::kInt);
  auto output = at::ones({4}, at::kInt), all = at::ones({12}, at::kInt);
  const bool root = group.rank() == 1;
  auto gathered = root ? outputs : Tensors();
  EXPECT_THROW(group.all_to_all(outputs, inputs), UsageError);
  EXPECT_THROW(group.all_to_all_single(all, all_given), UsageError);
  EXPECT_THROW(group.all_gather(outputs, given), UsageError);
  EXPECT_THROW(group.all_gather_into_tensor(all, given), UsageError);
  EXPECT_THROW(group.reduce_scatter(output, inputs), UsageError);
  EXPECT_THROW(group.reduce_scatter_tensor(output, all_given), UsageError);
  if (root) {
    EXPECT_THROW(group.gather(gathered, given, 1), UsageError);
    EXPECT_THROW(group.scatter(output, inputs, 1), UsageError);
  }
  EXPECT_EQ(output.sum().item<int>(), 4) << "nothing was written";
  auto sum = at::ones({4}, at::kFloat);
  group.all_reduce(sum);
  EXPECT_EQ(sum.sum().item<float>(), 4.0F * 3);
}

TEST(OutputDtype, OverSharedMemory) {
  testing::run_group(3, refuses_other_outputs, {.backend = "shm"});
}

TEST(OutputDtype, OverHosts) {
  testing::run_group(3, refuses_other_outputs, {.backend = "hierarchical", .hosts = "aab"});
}

}  // namespace
}  // namespace lockstep
