#include "lockstep/train/step_profiler.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lockstep/base/error.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/models/models.h"
#include "lockstep/parallel/ddp.h"
#include "tests/support/run_group.h"

namespace lockstep {
namespace step_profiler_test {

using test::run_group;

void expect_within(const TimeSpan& inner, const TimeSpan& outer) {
  EXPECT_LE(outer.begin, inner.begin);
  EXPECT_LE(inner.end, outer.end);
  EXPECT_LE(inner.begin, inner.end);
}

TEST(StepProfiler, NotesPartsWithinSteps) {
  StepProfiler profiler{ProcessGroup()};
  for (int i = 0; i < 3; ++i) {
    const auto step = profiler.step();
    for (const StepPart which : {StepPart::data, StepPart::forward, StepPart::optimizer}) {
      const auto part = profiler.part(which);
    }
  }
  const StepProfile profile = profiler.finish();
  ASSERT_EQ(profile.steps.size(), 3u);
  ASSERT_EQ(profile.parts.size(), 9u);
  for (size_t i = 0; i < 9; ++i) expect_within(profile.parts[i].time, profile.steps[i / 3]);
  EXPECT_EQ(profile.parts[4].part, StepPart::forward);
  EXPECT_TRUE(profile.calls.empty());
}

TEST(StepProfiler, AStepThatThrowsEndsItsMarks) {
  StepProfiler profiler{ProcessGroup()};
  try {
    const auto step = profiler.step();
    const auto part = profiler.part(StepPart::forward);
    throw Error("a bad batch");
  } catch (const Error&) {
  }
  const StepProfile profile = profiler.finish();
  expect_within(profile.parts.at(0).time, profile.steps.at(0));
}

TEST(StepProfiler, SeesTheReducersCollectivesOverGloo) {
  static constexpr int kSteps = 5;
  run_group(2, [](ProcessGroup group) {
    at::manual_seed(1);
    const auto model = make_model("convnet");
    DistributedDataParallel ddp(model, group);
    const at::Tensor x = at::ones({2, 1, 28, 28});
    StepProfiler profiler(group);
    for (int i = 0; i < kSteps; ++i) {
      const auto step = profiler.step();
      at::Tensor loss;
      {
        const auto part = profiler.part(StepPart::forward);
        loss = ddp.forward(x).sum();
      }
      const auto part = profiler.part(StepPart::backward);
      loss.backward();
    }
    const StepProfile profile = profiler.finish();
    EXPECT_EQ(profile.rank, group.rank());
    // The gradients in one bucket, and batch norm's buffers before each forward.
    int64_t bytes = 0;
    int broadcasts = 0;
    for (const CallSpan& call : profile.calls) {
      EXPECT_LE(call.time.begin, call.returned);
      EXPECT_LE(call.time.begin, call.time.end);
      if (call.name == "all_reduce") bytes += call.bytes;
      if (call.name == "broadcast") ++broadcasts;
    }
    EXPECT_EQ(bytes, kSteps * 29034 * 4);
    EXPECT_GE(broadcasts, kSteps);
    const auto analysis = analyse(profile);
    for (const StepBreakdown& step : analysis.steps) {
      EXPECT_GT(step.exposed, 0);
      EXPECT_NEAR(std::accumulate(step.parts.begin(), step.parts.end(), step.exposed + step.rest),
                  step.step, 1e-6);
    }
    // The profiler is gone: what comes now is nobody's.
    at::Tensor one = at::ones({1});
    group.all_reduce(one);
    EXPECT_EQ(one.item<float>(), 2);
  });
}

TEST(StepProfiler, OperationsLieOnTheThreadThatRunsThem) {
  StepProfilerOptions options;
  options.operations = true;
  StepProfiler profiler(ProcessGroup(), options);
  {
    const auto step = profiler.step();
    const at::Tensor weight = at::ones({4, 4}).requires_grad_();
    at::mm(weight, at::ones({4, 4})).sum().backward();
  }
  const StepProfile profile = profiler.finish();
  const auto has = [&](const std::string& name) {
    return std::any_of(profile.operations.begin(), profile.operations.end(),
                       [&](const OperationSpan& span) { return span.name == name; });
  };
  EXPECT_TRUE(has("aten::mm"));
  EXPECT_TRUE(has("MmBackward0"));
  for (const auto& span : profile.operations) expect_within(span.time, profile.steps.at(0));
  const size_t before = profile.operations.size();
  EXPECT_GT(before, 0u);
  at::ones({2}).add(1);  // No callback is left.
  EXPECT_TRUE(profiler.finish().operations.empty());
}

struct Counter : CallObserver {
  std::atomic<int> begun{0}, ended{0}, failed{0};
  std::atomic<int64_t> bytes{0};
  void call_begins() noexcept override { ++begun; }
  void call_ended(const ObservedCall& call, bool bad) noexcept override {
    bytes += call.bytes;
    failed += bad;
    ++ended;
  }
};

TEST(CallObserver, CountsEveryCollectiveOnce) {
  run_group(2, [](ProcessGroup group) {
    const auto counter = std::make_shared<Counter>();
    observe_calls(group, counter);
    at::Tensor tensor = at::ones({8});
    group.all_reduce(tensor);
    group.broadcast(tensor, 0);
    at::Tensor all = at::empty({16});
    group.all_gather_into_tensor(all, tensor);
    group.barrier();
    observe_calls(group, nullptr);
    group.all_reduce(tensor);
    EXPECT_EQ(counter->begun, 4);
    EXPECT_EQ(counter->ended, 4);
    EXPECT_EQ(counter->failed, 0);
    EXPECT_EQ(counter->bytes, 3 * 32);
  });
}

TEST(CallObserver, ACallThatThrowsHasFailed) {
  run_group(2, [](ProcessGroup group) {
    const auto counter = std::make_shared<Counter>();
    observe_calls(group, counter);
    at::Tensor tensor = group.rank() == 0 ? at::ones({8}) : at::ones({9});
    EXPECT_THROW(group.all_reduce(tensor), MismatchError);
    EXPECT_EQ(counter->begun, 1);
    EXPECT_EQ(counter->failed, 1);
    observe_calls(group, nullptr);
  });
}

TEST(CallObserver, ANullGroupIsAnError) {
  EXPECT_THROW(observe_calls(ProcessGroup(), nullptr), UsageError);
}

}  // namespace step_profiler_test
}  // namespace lockstep
