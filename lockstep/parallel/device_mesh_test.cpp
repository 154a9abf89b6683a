#include "lockstep/parallel/device_mesh.h"

#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "tests/support/over_backends.h"

namespace lockstep {
namespace device_mesh_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string error_of(const std::string& text, int ranks) {
  try {
    parse_mesh(text, ranks);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

TEST(ParseMesh, ReadsNamesAndSizes) {
  EXPECT_THAT(parse_mesh("dp=2,pp=3", 6),
              ElementsAre(MeshDimension{"dp", 2}, MeshDimension{"pp", 3}));
  EXPECT_THAT(parse_mesh("dp=-1,pp=3", 12),
              ElementsAre(MeshDimension{"dp", 4}, MeshDimension{"pp", 3}));
  EXPECT_EQ(mesh_text(parse_mesh("a=1,b_2=-1", 5)), "a=1,b_2=5");
}

TEST(ParseMesh, SaysWhatDoesNotFit) {
  const std::pair<const char*, const char*> wrong[] = {
      {"dp=2,pp=2", "has room for 4 ranks, but there are 6"},
      {"dp=-1,pp=4", "6 ranks cannot be divided by 4"},
      {"dp=-1,pp=-1", "only one dimension can be -1"},
      {"dp=2,dp=3", "dimension dp comes twice"},
      {"dp=0,pp=6", "dimension dp has size 0"},
      {"dp=1000000,pp=1000000,tp=1000000", "has room for"}};
  for (const auto& [text, said] : wrong) EXPECT_THAT(error_of(text, 6), HasSubstr(said));
  for (const char* text : {"", "dp", "=2", "dp=", "dp=two", "dp=2,", "d p=2"})
    EXPECT_THROW(parse_mesh(text, 2), UsageError) << text;
}

class DeviceMeshTest : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, DeviceMeshTest, test::over_backends(), test::backend_name);

int sum_of_ranks(const ProcessGroup& group, int rank) {
  at::Tensor sum = at::full({1}, rank, at::kInt);
  group.all_reduce(sum);
  return sum.item<int>();
}

TEST_P(DeviceMeshTest, LaysRanksOutRowByRow) {
  run_group(4, [](ProcessGroup group) {
    const DeviceMesh mesh = init_device_mesh(group, "dp=2,pp=-1");
    const int rank = group.rank();
    EXPECT_THAT(mesh.get_coordinate(), ElementsAre(rank / 2, rank % 2));
    EXPECT_EQ(mesh.size(), 4);
    EXPECT_EQ(mesh.ndim(), 2);
    EXPECT_EQ(mesh.size("pp"), 2);
    EXPECT_EQ(mesh.get_group("dp").rank(), rank / 2);
    EXPECT_EQ(mesh.get_group("pp").rank(), mesh.get_local_rank("pp"));
    EXPECT_EQ(sum_of_ranks(mesh.get_group("pp"), rank), rank < 2 ? 1 : 5);
    EXPECT_EQ(sum_of_ranks(mesh.get_group("dp"), rank), rank % 2 == 0 ? 2 : 4);
    EXPECT_THROW(mesh.get_group(), UsageError);
    EXPECT_THROW(mesh.get_group("tp"), UsageError);
  });
}

TEST_P(DeviceMeshTest, DimensionsTogetherAreAGroup) {
  run_group(8, [](ProcessGroup group) {
    const DeviceMesh mesh = init_device_mesh(group, "a=2,b=2,c=2");
    const ProcessGroup outer = mesh.flatten({"a", "c"});
    EXPECT_EQ(outer.size(), 4);
    EXPECT_EQ(outer.rank(), mesh.get_local_rank("a") * 2 + mesh.get_local_rank("c"));
    EXPECT_EQ(sum_of_ranks(outer, group.rank()), mesh.get_local_rank("b") == 0 ? 10 : 18);
    EXPECT_TRUE(mesh.flatten({"a", "b", "c"}) == group);
    EXPECT_TRUE(mesh.flatten({"b"}) == mesh.get_group("b"));
    EXPECT_EQ(mesh.flatten({}).size(), 1);
    EXPECT_THROW((void)mesh.flatten({"d"}), UsageError);
  });
}

TEST_P(DeviceMeshTest, OneDimensionOfAllRanksIsTheGroupItself) {
  run_group(3, [](ProcessGroup group) {
    const DeviceMesh mesh = init_device_mesh(group, "pp=3");
    EXPECT_TRUE(mesh.get_group() == group);
    EXPECT_THROW(init_device_mesh(group, "dp=2,pp=2"), UsageError);
    using Dimensions = std::vector<MeshDimension>;
    for (const Dimensions& wrong : {Dimensions{{"dp", -1}, {"pp", 3}}, {{"a", -3}, {"b", -1}}})
      EXPECT_THROW(DeviceMesh(group, wrong), UsageError);
  });
}

}  // namespace device_mesh_test
}  // namespace lockstep
