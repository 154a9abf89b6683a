// The step loop over each strategy, by name: the same weights, and mistakes that all have alike.

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <map>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/parallel/state_dict.h"
#include "lockstep/parallel/strategies/strategies.h"
#include "lockstep/train/step_loop.h"
#include "tests/support/published.h"
#include "tests/support/run_group.h"
#include "tests/support/small_task.h"

namespace lockstep {
namespace training_strategies_test {

using test::noise_images;
using test::run_group;
using test::small_task;
using test::TrainTask;
using ::testing::HasSubstr;

/// Those of several processes.
std::vector<std::string> strategies_of_ranks() {
  std::vector<std::string> names = strategy_names();
  std::erase(names, "dp");
  return names;
}

class EachStrategy : public ::testing::TestWithParam<std::string> {
 protected:
  TrainerOptions options() const { return {.max_epochs = 1, .strategy = GetParam()}; }
  /// Made before the ranks' threads begin, which share LibTorch's random state.
  std::vector<TrainTask> tasks(int ranks, const char* model = "mlp",
                               const std::string& strategy = GetParam()) const {
    std::vector<TrainTask> all;
    for (int rank = 0; rank < ranks; ++rank) {
      const DataShare share = data_share(strategy, {}, rank, ranks);
      all.push_back(small_task(model, noise_images(48), share.rank, share.size));
    }
    return all;
  }
};
INSTANTIATE_TEST_SUITE_P(All, EachStrategy, ::testing::ValuesIn(strategies_of_ranks()),
                         [](const auto& info) { return info.param; });

/// The weights after an epoch, by name.
StateDict trained(std::vector<TrainTask> tasks, const TrainerOptions& options) {
  StateDict weights;
  run_group(static_cast<int>(tasks.size()),
            [&](ProcessGroup group) {
              const auto rank = static_cast<size_t>(group.rank());
              StepLoop loop(tasks[rank], group, options);
              loop.run_epoch(0, 0, [](const StepResult&) { return true; });
              StateDict state = detail::model_state(*tasks[rank].module, loop.parts());
              for (auto& [name, tensor] : state) tensor = tensor.clone();
              if (rank == 0) weights = std::move(state);
            },
            {.backend = "shm"});
  return weights;
}

/// Cut differently over ranks, the same samples are in each step. A sum in another order has other
/// last bits.
TEST_P(EachStrategy, TrainsAsOneRankDoesOnTheJoinedBatches) {
  const auto one = [&](int64_t batches) {
    std::vector<TrainTask> single;
    single.push_back(small_task("mlp", noise_images(48)));
    return trained(std::move(single), {.max_epochs = 1, .accumulate_grad_batches = batches});
  };
  for (const int ranks : {1, 2, 3}) {
    const StateDict expected = one(data_share(GetParam(), {}, 0, ranks).size);
    const StateDict found = trained(tasks(ranks), options());
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(found[i].first, expected[i].first);
      EXPECT_TRUE(at::allclose(found[i].second, expected[i].second, 1e-4, 1e-6))
          << found[i].first << " with " << ranks << " ranks";
    }
  }
}

TEST_P(EachStrategy, WhatASetupLacksIsNamed) {
  run_group(1, [&](ProcessGroup group) {
    StrategySetup whole;
    whole.module = std::make_shared<torch::nn::LinearImpl>(2, 2);
    whole.make_optimizer = optimizer_factory("sgd");
    whole.group = group;
    const auto refused = [&](const StrategySetup& setup, const std::string& what) {
      EXPECT_THAT([&] { make_strategy(GetParam(), setup); },
                  ::testing::ThrowsMessage<UsageError>(HasSubstr(what)));
    };
    StrategySetup setup = whole;
    setup.module = nullptr;
    refused(setup, "module");
    setup = whole;
    setup.make_optimizer = nullptr;
    refused(setup, "make_optimizer");
    setup = whole;
    setup.group = {};
    refused(setup, "group");
  });
}

TEST_P(EachStrategy, RanksWhoseModelsDifferAreToldOnAllRanks) {
  std::vector<TrainTask> all = tasks(2);
  all[1] = small_task("wide", noise_images(48), 1, 2);
  std::vector<test::Outcome> outcomes(2);
  run_group(2,
            [&](ProcessGroup group) {
              const auto rank = static_cast<size_t>(group.rank());
              outcomes[rank] =
                  test::outcome_of([&] { StepLoop loop(all[rank], group, options()); });
            },
            {.timeout = std::chrono::seconds(5), .backend = "shm"});
  for (const auto& outcome : outcomes) EXPECT_TRUE(outcome.is<MismatchError>()) << outcome.text();
}

StateDict copied(const StateDict& state) {
  StateDict copy;
  for (const auto& [name, tensor] : state) copy.emplace_back(name, tensor.clone());
  return copy;
}

/// With gradients that add up and are clipped, and a state in the middle of an epoch.
TEST_P(EachStrategy, GoesOnFromAStateInEachPrecision) {
  const std::vector<PrecisionOptions> precisions{{.precision = "32-true", .loss_scale = "128"},
                                                 {.precision = "16-mixed"},
                                                 {.amp_level = "O2"},
                                                 {.precision = "bf16-true"}};
  for (const PrecisionOptions& precision : precisions) {
    SCOPED_TRACE(precision.precision + precision.amp_level);
    TrainerOptions options = this->options();
    options.precision = precision;
    options.accumulate_grad_batches = 2;
    options.gradient_clip_val = 0.5;
    std::vector<TrainTask> first = tasks(2), second = tasks(2), third = tasks(2);
    test::Published<StateDict> model, optimizer, scaler;  // Whole: of rank 0.
    StateDict expected, got;
    run_group(2,
              [&](ProcessGroup group) {
                const auto rank = static_cast<size_t>(group.rank());
                const auto keep = [&](auto& kept, const StateDict& state) {
                  if (rank == 0) kept.set(copied(state));
                };
                StepLoop whole(first[rank], group, options);
                int64_t batches = 0;
                whole.run_epoch(0, 0, [&](const StepResult& result) {
                  if (result.step > 1) return true;
                  batches = result.batches;
                  keep(model, detail::model_state(*first[rank].module, whole.parts()));
                  keep(optimizer, detail::optimizer_state(whole.parts()));
                  keep(scaler, detail::precision_state(whole.parts()));
                  return true;
                });
                const StateDict whole_state =
                    detail::model_state(*first[rank].module, whole.parts());
                if (rank == 0) expected = copied(whole_state);
                StepLoop resumed(second[rank], group, options);
                resumed.warm_up();
                detail::load_model_state(*second[rank].module, resumed.parts(), model.get());
                detail::load_optimizer_state(resumed.parts(), optimizer.get());
                detail::load_precision_state(resumed.parts(), scaler.get());
                resumed.load_values(1, {});
                resumed.run_epoch(0, batches, [](const StepResult&) { return true; });
                const StateDict resumed_state =
                    detail::model_state(*second[rank].module, resumed.parts());
                if (rank == 0) got = copied(resumed_state);
                if (precision.amp_level != "O2") return;
                StepLoop plain(third[rank], group, this->options());
                EXPECT_THAT([&] { detail::load_optimizer_state(plain.parts(), optimizer.get()); },
                            ::testing::ThrowsMessage<CheckpointError>(HasSubstr("amp level O2")));
              },
              {.backend = "shm"});
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i)
      EXPECT_TRUE(at::equal(got[i].second, expected[i].second)) << got[i].first;
  }
}

void expect_same(const StateDict& found, const StateDict& expected) {
  ASSERT_EQ(found.size(), expected.size());
  const std::map<std::string, at::Tensor> wanted(expected.begin(), expected.end());
  for (const auto& [name, tensor] : found) EXPECT_TRUE(at::equal(tensor, wanted.at(name))) << name;
}

/// Each rank's part of the state, of a strategy over 2 ranks, becomes that of this one over 3.
TEST_P(EachStrategy, ReadsWhatItNeedsOfWhatAnyOtherSavedAtAnySize) {
  for (const std::string& saver : strategies_of_ranks()) {
    SCOPED_TRACE(saver + ", then " + GetParam());
    TemporaryDirectory folder;
    const TrainerOptions saving{.max_epochs = 1, .strategy = saver};
    std::vector<TrainTask> first = tasks(2, "mlp", saver), second = tasks(3);
    StateDict model, optimizer;
    run_group(2,
              [&](ProcessGroup group) {
                TrainTask& task = first[static_cast<size_t>(group.rank())];
                StepLoop loop(task, group, saving);
                loop.run_epoch(0, 0, [](const StepResult&) { return true; });
                CheckpointShards shards;
                shards.model = detail::model_shards(*task.module, loop.parts());
                shards.state = detail::optimizer_shards(loop.parts());
                CheckpointFolder checkpoints(folder.path());
                save_checkpoint(group, checkpoints, shards);
                const StateDict whole_model = detail::model_state(*task.module, loop.parts());
                const StateDict whole_optimizer = detail::optimizer_state(loop.parts());
                if (group.rank() != 0) return;
                model = copied(whole_model);
                optimizer = copied(whole_optimizer);
              },
              {.backend = "shm"});
    std::atomic<int64_t> read = 0;
    run_group(3,
              [&](ProcessGroup group) {
                TrainTask& task = second[static_cast<size_t>(group.rank())];
                StepLoop loop(task, group, options());
                const StoredCheckpoint stored =
                    *load_checkpoint(group, folder.path().string(), nullptr, {}, c10::kCPU);
                const auto of_model = detail::needed_of_model(loop.parts());
                const auto of_optimizer = detail::needed_of_optimizer(loop.parts());
                detail::load_model_state(*task.module, loop.parts(),
                                         read_tensors(stored, stored.model, "", of_model));
                detail::load_optimizer_state(loop.parts(),
                                             read_tensors(stored, stored.state, "", of_optimizer));
                read += *stored.bytes_read;
                const StateDict found = detail::model_state(*task.module, loop.parts());
                const StateDict found_optimizer = detail::optimizer_state(loop.parts());
                if (group.rank() != 0) return;
                expect_same(found, model);
                expect_same(found_optimizer, optimizer);
              },
              {.backend = "shm"});
    const auto bytes = [](const StateDict& state) {
      int64_t sum = 0;
      for (const auto& [name, tensor] : state) sum += static_cast<int64_t>(tensor.nbytes());
      return sum;
    };
    const bool cuts_model = GetParam() == "fsdp" || GetParam() == "pipeline";
    const bool cuts_optimizer = GetParam() != "ddp";
    EXPECT_EQ(read,
              bytes(model) * (cuts_model ? 1 : 3) + bytes(optimizer) * (cuts_optimizer ? 1 : 3));
  }
}

/// Rank 1 goes away before it has given its part.
TEST_P(EachStrategy, AStateThatARankIsMissingFromIsATimeoutThatNamesIt) {
  std::vector<TrainTask> all = tasks(2);
  test::Outcome outcome;
  bool sharded = false;
  std::promise<void> done;
  auto finished = done.get_future().share();
  run_group(2,
            [&](ProcessGroup group) {
              const auto rank = static_cast<size_t>(group.rank());
              StepLoop loop(all[rank], group, options());
              loop.run_epoch(0, 0, [](const StepResult&) { return true; });
              if (rank == 1) return finished.wait();
              const StateBytes mine = loop.parts().front()->strategy().state_bytes();
              int64_t whole = 0;
              for (const at::Tensor& parameter : all[rank].module->parameters()) {
                whole += parameter.numel() * parameter.element_size();
              }
              sharded = mine.optimizer < whole;
              outcome = test::outcome_of([&] {
                detail::optimizer_state(loop.parts());
                detail::model_state(*all[rank].module, loop.parts());
              });
              done.set_value();
            },
            {.timeout = std::chrono::seconds(2), .backend = "shm"});
  // Where rank 0 has everything, it needs nobody.
  EXPECT_EQ(outcome.ok(), !sharded) << outcome.text();
  if (outcome.ok()) return;
  EXPECT_TRUE(outcome.is<TimeoutError>()) << outcome.text();
  EXPECT_THAT(outcome.text(), HasSubstr("rank 1"));
}

}  // namespace training_strategies_test
}  // namespace lockstep
