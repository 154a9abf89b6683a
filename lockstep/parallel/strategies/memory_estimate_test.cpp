#include "lockstep/parallel/strategies/strategies.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"

namespace lockstep {
namespace memory_estimate_test {

MemoryQuestion million(int ranks) {
  MemoryQuestion question;
  question.elements = 1'000'000;
  question.ranks = ranks;
  return question;
}

TEST(MemoryEstimate, FollowsTheFormulasOfZero) {
  const auto total = [](const char* strategy, int ranks) {
    return estimate_memory(strategy, million(ranks)).state.total();
  };
  EXPECT_EQ(total("ddp", 4), 16'000'000);
  EXPECT_EQ(total("zero1", 4), 8'000'000 + 2'000'000);
  EXPECT_EQ(total("zero2", 4), 4'000'000 + 3'000'000);
  EXPECT_EQ(total("fsdp", 4), 4'000'000);
  for (const std::string& strategy : estimated_strategies())
    EXPECT_EQ(total(strategy.c_str(), 1), 16'000'000) << strategy;
}

TEST(MemoryEstimate, FollowsTheMesh) {
  const auto state = [](const char* strategy, const char* mesh) {
    MemoryQuestion question = million(8);
    question.mesh = mesh;
    return estimate_memory(strategy, question).state.total();
  };
  EXPECT_EQ(state("fsdp", "dp_replicate=2,dp_shard=4"), 4'000'000);
  EXPECT_EQ(state("fsdp", "pp=2,dp_replicate=2,dp_shard=2"), 4'000'000);
  EXPECT_EQ(state("ddp", "pp=2,dp=4"), 8'000'000);
  EXPECT_EQ(state("zero1", "pp=2,dp=4"), 4'000'000 + 1'000'000);
  EXPECT_EQ(state("pipeline", ""), 2'000'000);
  EXPECT_THROW(state("ddp", "dp_shard=8"), UsageError);
}

TEST(MemoryEstimate, KnowsOptimizersAndFrozenParameters) {
  MemoryQuestion question = million(2);
  question.frozen_elements = 500'000;
  EXPECT_EQ(estimate_memory("ddp", question).state.parameters, 6'000'000);
  EXPECT_EQ(estimate_memory("ddp", question).state.gradients, 4'000'000);
  question.optimizer = "sgd";
  EXPECT_EQ(estimate_memory("ddp", question).state.optimizer, 0);
  question.optimizer_options.momentum = 0.9;
  EXPECT_EQ(estimate_memory("fsdp", question).state.optimizer, 2'000'000);
  question.optimizer = "rmsprop";
  question.optimizer_options.centered = true;
  EXPECT_EQ(estimate_memory("ddp", question).state.optimizer, 12'000'000);
  question.optimizer = "lbfgs";
  question.optimizer_options.history_size = 10;
  EXPECT_EQ(estimate_memory("ddp", question).state.optimizer, 22 * 4'000'000);
  EXPECT_THROW(estimate_memory("fsdp", question), UsageError);
}

TEST(MemoryEstimate, WorkingMemoryGrowsWithTheLargestUnit) {
  MemoryQuestion question = million(2);
  EXPECT_EQ(estimate_memory("ddp", question).working, 0);
  question.largest_unit_elements = 100'000;
  EXPECT_EQ(estimate_memory("fsdp", question).working, (3 + 2) * 400'000);
  question.gathered_element_bytes = 2;
  EXPECT_EQ(estimate_memory("fsdp", question).working, 3 * 200'000 + 2 * 400'000);
  question.shared_memory = true;
  EXPECT_EQ(estimate_memory("fsdp", question).working, 2 * 400'000);
}

TEST(MemoryEstimate, WrongQuestionsAreRefused) {
  EXPECT_THROW(estimate_memory("zero4", million(1)), UsageError);
  EXPECT_THROW(estimate_memory("ddp", million(0)), UsageError);
  MemoryQuestion question = million(1);
  question.optimizer = "adamm";
  EXPECT_THROW(estimate_memory("ddp", question), UsageError);
}

}  // namespace memory_estimate_test
}  // namespace lockstep
