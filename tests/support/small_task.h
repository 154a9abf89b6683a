#pragma once

// For tests: little to train, so that a run takes milliseconds.

#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>

#include <memory>
#include <utility>

#include "lockstep/train/batch_feed.h"
#include "lockstep/train/model_training.h"

namespace lockstep::test {

using detail::train_task;
using detail::TrainTask;

inline TensorDataset noise_images(int64_t count) {
  at::manual_seed(3);
  TensorDataset dataset;
  dataset.name = "noise";
  dataset.data = at::rand({count, 784});
  dataset.targets = at::randint(10, {count}, at::kLong);
  dataset.num_classes = 10;
  return dataset;
}

inline DataLoader loader_of(TensorDataset dataset, int rank = 0, int ranks = 1) {
  SamplerOptions sampler;
  sampler.dataset_size = dataset.size();
  sampler.rank = rank;
  sampler.world_size = ranks;
  LoaderOptions options;
  options.batch_size = 8;
  return DataLoader(std::move(dataset), DistributedSampler(sampler), Compose(), options);
}

/// 5 batches an epoch. fashion-cnn has dropout and batch norm: random state and buffers matter.
inline TrainTask small_task(const char* model = "mlp", TensorDataset dataset = noise_images(40),
                            int rank = 0, int ranks = 1, ScheduleOptions schedule = {}) {
  at::manual_seed(1);
  ModelTrainingOptions options;
  options.optimizer.make = optimizer_factory("sgd", {.lr = 0.001, .momentum = 0.9});
  options.optimizer.schedule = std::move(schedule);
  auto module = std::make_shared<ModelTraining>(make_model(model), std::move(options));
  DataLoader validation = loader_of(dataset, rank, ranks);
  return train_task(module, loader_of(std::move(dataset), rank, ranks), std::move(validation));
}

}  // namespace lockstep::test
