#include "lockstep/parallel/pipeline/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "lockstep/base/error.h"

namespace lockstep {
namespace simulation_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

PipelineTimeline simulate(const std::string& name, const PipelineShape& shape,
                          const StageCosts& costs = {}, double transfer = 0) {
  return simulate_pipeline(make_pipeline_schedule(name, shape), {{costs}, transfer});
}

/// A row a rank: letters are F, B, I and W, dots are idle, a column is a unit of time.
std::string draw_as_text(const PipelineTimeline& timeline) {
  std::string text;
  for (size_t rank = 0; rank < timeline.ranks.size(); ++rank) {
    std::string row(static_cast<size_t>(timeline.length), '.');
    for (const TimedAction& timed : timeline.ranks[rank]) {
      const std::string name = to_string(timed.action);
      const char letter = name[name.find_first_of("FBIW")];
      for (auto at = static_cast<size_t>(timed.start); at < timed.end; ++at) row[at] = letter;
    }
    text += "rank " + std::to_string(rank) + "  " + row + "\n";
  }
  return text;
}

TEST(PipelineSimulation, BubblesAreThoseOfTheFormulas) {
  for (const std::string& name : pipeline_schedule_names()) {
    for (const int ranks : {1, 2, 3, 4, 8}) {
      for (const int rounds : {1, 2, 4}) {
        const PipelineShape shape{ranks, ranks * rounds};
        EXPECT_NEAR(simulate(name, shape).bubble, bubble_formula(name, shape), 1e-9)
            << name << " with " << ranks << " ranks and " << rounds << " rounds";
      }
    }
  }
}

TEST(PipelineSimulation, OtherCostsStayWithinFivePoints) {
  const StageCosts uneven{1, 1.3, 0.8};
  for (const std::string& name : pipeline_schedule_names()) {
    for (const int ranks : {2, 4}) {
      for (const int micro_batches : {4, 8, 16}) {
        const PipelineShape shape{ranks, micro_batches};
        EXPECT_NEAR(simulate(name, shape, uneven).bubble, bubble_formula(name, shape, uneven), 0.05)
            << name << " with " << ranks << " ranks and " << micro_batches;
      }
    }
  }
}

TEST(PipelineSimulation, SeveralStagesARankDivideTheBubble) {
  const double one = simulate("1f1b", {4, 8}).bubble;
  const double two = simulate("interleaved-1f1b", {4, 8, 2}).bubble;
  const double four = simulate("interleaved-1f1b", {4, 8, 4}).bubble;
  EXPECT_GT(one, two);
  EXPECT_GT(two, four);
  EXPECT_NEAR(four, bubble_formula("interleaved-1f1b", {4, 8, 4}), 1e-9);
}

TEST(PipelineSimulation, CountsWhatIsKept) {
  EXPECT_THAT(simulate("gpipe", {3, 5}).peak_activations, ElementsAre(5, 5, 5));
  EXPECT_THAT(simulate("1f1b", {3, 5}).peak_activations, ElementsAre(3, 2, 1));
  EXPECT_THAT(simulate("zero-bubble", {3, 5}).peak_activations, ElementsAre(3, 3, 3));
}

TEST(PipelineSimulation, TransfersTakeTime) {
  EXPECT_GT(simulate("1f1b", {2, 4}, {}, 0.5).length, simulate("1f1b", {2, 4}).length);
  EXPECT_EQ(simulate("1f1b", {1, 4}, {}, 0.5).length, 12);
}

TEST(PipelineSimulation, DrawsTheTimeline) {
  const auto schedule = make_pipeline_schedule("1f1b", {2, 3});
  const auto timeline = simulate_pipeline(schedule, {{StageCosts{}}, 0});
  EXPECT_EQ(draw_as_text(timeline),
            "rank 0  FF..BBFBB.BB\n"
            "rank 1  .FBBFBBFBB..\n");
  const std::string svg = draw_as_svg(schedule, timeline);
  EXPECT_THAT(svg, HasSubstr("1f1b, 2 ranks, 2 stages, 3 micro-batches: 25% of the time"));
  EXPECT_THAT(svg, HasSubstr("<title>1B2</title>"));
  size_t boxes = 0;
  for (size_t at = 0; (at = svg.find("<title>", at)) != std::string::npos; ++at) ++boxes;
  EXPECT_EQ(boxes, 12u);
}

TEST(PipelineSimulation, RefusesADeadlock) {
  auto schedule = make_pipeline_schedule("gpipe", {2, 1});
  std::reverse(schedule.actions[0].begin(), schedule.actions[0].end());
  EXPECT_THROW(simulate_pipeline(schedule, {{StageCosts{}}, 0}), UsageError);
}

TEST(PipelineSimulation, RefusesCostsOfOtherStages) {
  const auto schedule = make_pipeline_schedule("1f1b", {2, 3});
  EXPECT_THROW(simulate_pipeline(schedule, {{{}, {}, {}}, 0}), UsageError);
}

}  // namespace simulation_test
}  // namespace lockstep
