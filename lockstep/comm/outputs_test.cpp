// What may be an output: refused are another dtype than the inputs' and elements that share memory,
// before anything is sent, so that the group can still be used. Leaves that require a gradient are
// taken.
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

void refuses_shared_elements(const ProcessGroup& group) {
  auto shared = at::zeros({1}).expand({3});
  EXPECT_THROW(group.all_reduce(shared), UsageError);
  EXPECT_THROW(group.all_gather_into_tensor(shared, at::ones({1})), UsageError);
  EXPECT_THROW(group.recv(shared, (group.rank() + 1) % 3), UsageError);
  group.barrier();
}

void takes_leaves(const ProcessGroup& group) {
  const at::NoGradGuard no_grad;
  const auto leaf = [] { return at::zeros({4}).set_requires_grad(true); };
  Tensors outputs = {leaf(), leaf(), leaf()};
  const auto given = at::full({4}, group.rank() + 1.0F);
  const Tensors all_given = {given, given, given};
  const auto expect_from_each = [&](const char* operation) {
    for (int rank = 0; rank < group.size(); ++rank)
      EXPECT_EQ(outputs[static_cast<size_t>(rank)].sum().item<float>(), 4.0F * (rank + 1.0F))
          << operation;
  };
  Tensors gathered = group.rank() == 1 ? outputs : Tensors();
  group.gather(gathered, given, 1);
  if (group.rank() == 1) expect_from_each("gather");
  group.all_to_all(outputs, all_given);
  expect_from_each("all_to_all");
  outputs = {leaf(), leaf(), leaf()};
  group.all_gather(outputs, given);
  expect_from_each("all_gather");
}

class Outputs : public ::testing::TestWithParam<testing::RankOptions> {};

TEST_P(Outputs, OfAnotherDtypeAreRefused) {
  testing::run_group(3, refuses_other_outputs, GetParam());
}

TEST_P(Outputs, WhoseElementsShareMemoryAreRefused) {
  testing::run_group(3, refuses_shared_elements, GetParam());
}

TEST_P(Outputs, MayBeLeavesThatRequireAGradient) {
  testing::run_group(3, takes_leaves, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Backends, Outputs,
                         ::testing::Values(testing::RankOptions{.backend = "shm"},
                                           testing::RankOptions{.backend = "hierarchical",
                                                                .hosts = "aab"}),
                         [](const auto& backend) { return backend.param.backend; });

TEST(OutputsOverGloo, OfAnotherDtypeAreRefused) {
  testing::run_group(3, refuses_other_outputs);
}

}  // namespace
}  // namespace lockstep
