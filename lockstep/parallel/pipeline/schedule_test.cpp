#include "lockstep/parallel/pipeline/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "tests/support/schedule_check.h"

namespace lockstep {
namespace schedule_test {

using test::fault_of;
using test::parse_pipeline_action;
using ::testing::HasSubstr;

/// The computations of a rank, as PyTorch writes them.
std::string computations(const PipelineSchedule& schedule, size_t rank) {
  std::vector<std::string> texts;
  for (const PipelineAction& action : schedule.actions.at(rank)) {
    if (is_compute(action.op)) texts.push_back(to_string(action));
  }
  return join(texts, " ");
}

std::string all_actions(const PipelineSchedule& schedule, size_t rank) {
  std::vector<std::string> texts;
  for (const PipelineAction& action : schedule.actions.at(rank)) texts.push_back(to_string(action));
  return join(texts, " ");
}

TEST(PipelineAction, IsWrittenAsInPyTorch) {
  const PipelineAction action{12, PipelineOp::send_backward, 3};
  EXPECT_EQ(to_string(action), "12SEND_B3");
  EXPECT_EQ(parse_pipeline_action("12SEND_B3"), action);
  for (const char* text : {"", "F", "1F", "F1", "1X2", "1F2x", "1F-2"}) {
    EXPECT_FALSE(parse_pipeline_action(text).has_value()) << text;
  }
}

TEST(PipelineSchedule, GpipeRunsAllForwardsFirst) {
  const auto schedule = make_pipeline_schedule("gpipe", {2, 3});
  EXPECT_EQ(computations(schedule, 0), "0F0 0F1 0F2 0B0 0B1 0B2");
  EXPECT_EQ(computations(schedule, 1), "1F0 1F1 1F2 1B0 1B1 1B2");
}

TEST(PipelineSchedule, OneForwardOneBackwardKeepsAsManyActivationsAsStagesFollow) {
  const auto schedule = make_pipeline_schedule("1f1b", {3, 4});
  EXPECT_EQ(computations(schedule, 0), "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3");
  EXPECT_EQ(computations(schedule, 1), "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3");
  EXPECT_EQ(computations(schedule, 2), "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3");
}

TEST(PipelineSchedule, ReceivesBeginOneComputationAhead) {
  const auto schedule = make_pipeline_schedule("1f1b", {2, 2});
  EXPECT_EQ(all_actions(schedule, 0), "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1");
  EXPECT_EQ(all_actions(schedule, 1), "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1");
}

TEST(PipelineSchedule, ZeroBubbleFillsWaitsWithWeights) {
  const auto schedule = make_pipeline_schedule("zero-bubble", {2, 3});
  EXPECT_EQ(computations(schedule, 0), "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2");
  EXPECT_EQ(computations(schedule, 1), "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2");
}

TEST(PipelineSchedule, StagesGoRoundTheRanks) {
  const auto schedule = make_pipeline_schedule("interleaved-1f1b", {2, 2});
  EXPECT_EQ(schedule.num_stages, 4);
  EXPECT_EQ(computations(schedule, 0), "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1");
  EXPECT_EQ(computations(schedule, 1), "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1");
}

TEST(PipelineSchedule, AllAreFreeOfDeadlock) {
  int checked = 0;
  for (const std::string& name : pipeline_schedule_names()) {
    for (int ranks = 1; ranks <= 6; ++ranks) {
      for (int micro_batches = 1; micro_batches <= 13; ++micro_batches) {
        for (int stages = 1; stages <= 4; ++stages) {
          const PipelineShape shape{ranks, micro_batches, stages};
          if (!fits_pipeline_schedule(name, shape)) {
            EXPECT_THROW(make_pipeline_schedule(name, shape), UsageError);
            continue;
          }
          EXPECT_EQ(fault_of(make_pipeline_schedule(name, shape)), "") << name;
          ++checked;
        }
      }
    }
  }
  EXPECT_GT(checked, 700);
}

PipelineSchedule by_hand(const std::vector<std::string>& ranks) {
  PipelineSchedule schedule{
      "mine", static_cast<int>(ranks.size()), static_cast<int>(ranks.size()), 1, {}};
  for (const std::string& text : ranks) {
    auto& actions = schedule.actions.emplace_back();
    for (const std::string& word : split(text, ' ')) {
      actions.push_back(parse_pipeline_action(word).value());
      schedule.num_micro_batches =
          std::max(schedule.num_micro_batches, actions.back().micro_batch + 1);
    }
  }
  return schedule;
}

TEST(ScheduleCheck, FindsADeadlockAndSaysWhoWaitsForWhat) {
  auto schedule = by_hand({"0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"});
  add_communication(schedule);
  EXPECT_TRUE(fault_of(schedule).starts_with("a deadlock: ")) << fault_of(schedule);
}

TEST(ScheduleCheck, FindsWhatIsMissingOrOutOfPlace) {
  const auto fault = [](const std::vector<std::string>& ranks, bool communicate = true) {
    auto schedule = by_hand(ranks);
    if (communicate) add_communication(schedule);
    return fault_of(schedule);
  };
  EXPECT_EQ(fault({"0F0 0B0", "1F0 1B0"}), "");
  EXPECT_EQ(fault({"0F0", "1F0 1B0"}), "rank 0: 0B0 is missing");
  EXPECT_EQ(fault({"0F0 0I0", "1F0 1B0"}), "rank 0: 0W0 is missing");
  EXPECT_EQ(fault({"0F0 0W0 0I0", "1F0 1B0"}), "rank 0: 0W0 comes before 0I0");
  EXPECT_EQ(fault({"0F0 0B0 0I0", "1F0 1B0"}), "rank 0: 0RECV_B0 comes twice");
  EXPECT_EQ(fault({"0B0 0F0", "1F0 1B0"}), "rank 0: 0B0 comes before 0F0");
  EXPECT_EQ(fault({"0F0 0B0 0F0", "1F0 1B0"}), "rank 0: 0F0 comes twice");
  EXPECT_EQ(fault({"0F0 1B0", "1F0 0B0"}), "rank 0: 1B0 is of a stage of rank 1");
  EXPECT_EQ(fault({"0F0 0B0 2F0", "1F0 1B0"}, false),
            "rank 0: 2F0 names a stage or micro-batch that is not there");
  EXPECT_EQ(fault({"0F0 0F1 0B1 0B0", "1F0 1F1 1B0 1B1"}),
            "rank 0: 0RECV_B0 comes after micro-batch 1");
  EXPECT_EQ(fault({"0F0 0B0", "1F0 1B0"}, false), "rank 0: 0F0 needs 0SEND_F0 after it");
  EXPECT_EQ(fault({"0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0"}, false),
            "rank 1: 1B0 needs 1SEND_B0 after it");
  EXPECT_EQ(fault({"0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1RECV_F0 1B0 1SEND_B0"}, false),
            "rank 1: 1F0 needs 1RECV_F0 before it");
  EXPECT_EQ(fault({"0F0 0SEND_F0 0RECV_B0 0B0 0SEND_B0", "1RECV_F0 1F0 1B0 1SEND_B0"}, false),
            "rank 0: 0SEND_B0 belongs to no computation");
}

std::string error_of(const std::string& name, const PipelineShape& shape) {
  try {
    make_pipeline_schedule(name, shape);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

TEST(PipelineSchedule, SaysWhatCannotBe) {
  EXPECT_THAT(error_of("1f1d", {2, 4}), HasSubstr("did you mean '1f1b'"));
  EXPECT_THAT(error_of("1f1b", {2, 4, 2}), HasSubstr("take interleaved-1f1b"));
  EXPECT_THAT(error_of("interleaved-1f1b", {2, 5}), HasSubstr("multiple of the 2 ranks"));
  EXPECT_THAT(error_of("gpipe", {2, 0}), HasSubstr("micro-batches is 0"));
  EXPECT_THAT(error_of("gpipe", {0, 1}), HasSubstr("ranks is 0"));
}

}  // namespace schedule_test
}  // namespace lockstep
