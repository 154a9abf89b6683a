#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <utility>

#include "lockstep/train/batch_feed.h"
#include "lockstep/train/training_module.h"

namespace lockstep {

/// What a training run works with: see training_task.
struct TrainTask {
  std::shared_ptr<TrainingModuleBase> module;
  std::unique_ptr<detail::BatchFeed> train;
  std::unique_ptr<detail::BatchFeed> test;  ///< Null: nothing is evaluated.
  c10::Device device = c10::kCPU;           ///< A Trainer sets that of its World.
};

/// A module, a loader of the batches that it learns from, and one of held-out batches. The loaders
/// are moved in and must be made alike on all ranks. See BatchLoader for what they need.
template <class M, class Train>
requires BatchLoader<Train, typename M::BatchType> TrainTask
training_task(std::shared_ptr<M> module, Train train) {
  TrainTask task;
  using Feed = detail::FeedOf<typename M::BatchType, Train>;
  task.module = std::move(module);
  task.train = std::make_unique<Feed>(std::move(train));
  return task;
}
template <class M, class Train, class Test>
requires BatchLoader<Train, typename M::BatchType> && BatchLoader<Test, typename M::BatchType>
    TrainTask training_task(std::shared_ptr<M> module, Train train, Test test) {
  TrainTask task = training_task(std::move(module), std::move(train));
  using Feed = detail::FeedOf<typename M::BatchType, Test>;
  task.test = std::make_unique<Feed>(std::move(test));
  return task;
}

}  // namespace lockstep
