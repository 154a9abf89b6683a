#include "lockstep/parallel/fsdp/unit_plan.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "lockstep/base/error.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/parallel/fsdp/sharded_parameters.h"
#include "tests/support/ddp_test_modules.h"

namespace lockstep::detail {
namespace unit_plan_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// As transformers are built: blocks in a list, small layers around it.
struct Blocks : torch::nn::Module {
  struct Block : torch::nn::Module {
    Block() {
      register_module("norm", torch::nn::Linear(2, 2));
      register_module("mlp",
                      torch::nn::Sequential(torch::nn::Linear(20, 30), torch::nn::Linear(30, 20)));
    }
  };
  Blocks() {
    register_module("embedding", torch::nn::Linear(5, 5));
    torch::nn::ModuleList list;
    for (int i = 0; i < 3; ++i) list->push_back(std::make_shared<Block>());
    register_module("h", list);
    register_module("head", torch::nn::Linear(40, 40));
    register_parameter("scale", at::ones({3}));
  }
};

std::vector<std::string> names_of(const std::vector<PlannedUnit>& units) {
  std::vector<std::string> names;
  for (const auto& unit : units) names.push_back(unit.name);
  return names;
}

std::vector<std::string> parameters_of(const PlannedUnit& unit) {
  std::vector<std::string> names;
  for (const auto& item : unit.parameters) names.push_back(item.name);
  return names;
}

TEST(UnitPlan, BlocksOfAListAreUnitsAndTheRestIsOne) {
  const Blocks blocks;
  // A block's own list has two big layers only with the smaller limit.
  const auto units = plan_units(blocks, {}, 1'000);
  EXPECT_THAT(names_of(units), ElementsAre("", "h.0", "h.1", "h.2", "head"));
  EXPECT_THAT(parameters_of(units[0]), ElementsAre("scale", "embedding.weight", "embedding.bias"));
  EXPECT_THAT(names_of(plan_units(blocks, {}, 500)),
              ElementsAre("", "h.0.mlp.0", "h.0.mlp.1", "h.1.mlp.0", "h.1.mlp.1", "h.2.mlp.0",
                          "h.2.mlp.1", "head"));
  EXPECT_THAT(names_of(plan_units(blocks, {}, 1'000'000)), ElementsAre(""));
}

TEST(UnitPlan, NamesDecideWhereTheyAreGiven) {
  const Blocks blocks;
  EXPECT_THAT(names_of(plan_units(blocks, {"h.*"}, 1)), ElementsAre("", "h.0", "h.1", "h.2"));
  EXPECT_THAT(names_of(plan_units(blocks, {"h.1", "h.1.mlp"}, 1)),
              ElementsAre("", "h.1", "h.1.mlp"));
  try {
    plan_units(blocks, {"haed"}, 1);
    ADD_FAILURE() << "accepted";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("did you mean 'head'"));
  }
  EXPECT_THROW(plan_units(blocks, {"head.*"}, 1), UsageError);
}

TEST(UnitPlan, ATiedParameterIsInOneUnit) {
  const ddp_test::Tied tied;
  const auto units = plan_units(tied, {}, 1);
  ASSERT_EQ(units.size(), 1u);
  EXPECT_THAT(parameters_of(units[0]), ElementsAre("weight"));
}

TEST(FlatUnit, PiecesCoverEachParameterOnceAndBeginAtBlocks) {
  const Blocks blocks;
  const auto planned = plan_units(blocks, {}, 1'000);
  for (const int ranks : {1, 2, 3, 4, 7, 50}) {
    const auto units = lay_out(planned, blocks, ranks);
    std::vector<int64_t> covered(blocks.parameters().size());
    for (int rank = 0; rank < ranks; ++rank) {
      for (const Piece& piece : pieces_of(units, rank)) {
        const FlatParameter& parameter = units[piece.unit].parameters[piece.parameter];
        EXPECT_EQ(piece.begin % kFlatBlock, 0);
        EXPECT_EQ(piece.shard_offset % kFlatBlock, 0);
        EXPECT_EQ(rank * units[piece.unit].shard_size() + piece.shard_offset,
                  parameter.offset + piece.begin);
        EXPECT_LE(piece.shard_offset + piece.size, units[piece.unit].shard_size());
        covered[parameter.index] += piece.size;
      }
    }
    const auto parameters = blocks.parameters();
    for (size_t i = 0; i < parameters.size(); ++i) EXPECT_EQ(covered[i], parameters[i].numel());
    for (const FlatUnit& unit : units) {
      const FlatParameter& last = unit.parameters.back();
      EXPECT_GT(unit.shard_size() * ranks, last.offset + last.tensor.numel());
    }
  }
}

TEST(FlatUnit, ParametersOfTwoDtypesBecomeTwoUnits) {
  Blocks blocks;
  blocks.register_parameter("fine", at::ones({4}, at::kDouble));
  const auto units = lay_out(plan_units(blocks, {}, 1'000'000), blocks, 2);
  ASSERT_EQ(units.size(), 2u);
  EXPECT_EQ(units[1].dtype, at::kDouble);
  EXPECT_EQ(units[1].parameters.size(), 1u);
}

TEST(FlatUnit, AChannelsLastParameterKeepsItsOrder) {
  const at::Tensor flat = at::arange(64, at::kFloat);
  const at::Tensor image = at::empty({2, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor view = view_like(flat, 16, image);
  EXPECT_EQ(view.strides(), image.strides());
  EXPECT_TRUE(at::equal(elements_like(view, image), flat.narrow(0, 16, 24)));
  EXPECT_TRUE(at::equal(elements_like(view.contiguous(), image), flat.narrow(0, 16, 24)));
}

std::vector<int> foretold(UseOrder& order, const std::vector<size_t>& uses) {
  std::vector<int> next;
  order.begin();
  for (const size_t unit : uses) {
    const auto one = order.use(unit);
    next.push_back(one ? static_cast<int>(*one) : -1);
  }
  return next;
}

TEST(UseOrder, ForetellsTheRoundBefore) {
  UseOrder order;
  EXPECT_THAT(foretold(order, {0, 1, 2, 1, 0}), ElementsAre(-1, -1, -1, -1, -1));
  EXPECT_THAT(foretold(order, {0, 1, 2, 1, 0}), ElementsAre(1, 2, 1, 0, -1));
  // An evaluation is the start of a round.
  EXPECT_THAT(foretold(order, {0, 1, 2}), ElementsAre(1, 2, 1));
  EXPECT_THAT(foretold(order, {0, 1, 2, 1, 0}), ElementsAre(1, 2, 1, 0, -1));
  // Another way is learned anew.
  EXPECT_THAT(foretold(order, {0, 2, 0}), ElementsAre(1, -1, -1));
  EXPECT_THAT(foretold(order, {0, 2, 0}), ElementsAre(2, 0, -1));
  EXPECT_THAT(foretold(order, {}), IsEmpty());
}

}  // namespace unit_plan_test
}  // namespace lockstep::detail
