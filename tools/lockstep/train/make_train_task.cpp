#include "tools/lockstep/train/make_train_task.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/words.h"
#include "lockstep/parallel/strategies/strategies.h"
#include "lockstep/train/memory_format.h"
#include "lockstep/train/model_training.h"
#include "lockstep/train/weights.h"
#include "tools/lockstep/train/placement.h"

namespace lockstep {
namespace {

LossKind loss_of(const ModelInfo& info) {
  return info.regression ? LossKind::mean_squared : LossKind::cross_entropy;
}

DatasetSplits load_splits(const RunConfig& config) {
  DatasetOptions options;
  options.data_dir = config.data_dir;
  options.download = config.download;
  return load_dataset(config.dataset, options);
}

Pipeline pipeline_for(const TensorDataset& dataset, const ModelInfo& info) {
  std::vector<TransformPtr> steps;
  if (dataset.data.scalar_type() == at::kByte) {
    const bool fashion = dataset.name == "fashion-mnist";
    steps.push_back(fashion ? normalize({0.2860}, {0.3530}) : normalize());
  }
  steps.push_back(reshape(info.input_shape));
  return Pipeline(std::move(steps));
}

void set_up_process(const RunConfig& config) {
  if (config.deterministic) {
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
    at::globalContext().setBenchmarkCuDNN(false);
    at::globalContext().setDeterministicCuDNN(true);
    at::globalContext().setDeterministicMkldnn(true);
  }
}

/// What torch.manual_seed does: every default generator.
void seed_everything(uint64_t seed) {
  at::manual_seed(seed);
}

OptimizerFactory optimizer_of(const RunConfig& config) {
  OptimizerOptions options;
  options.lr = config.lr.value_or(default_lr(config.optimizer, config.model));
  options.momentum = config.momentum.value_or(default_momentum(config.optimizer));
  options.weight_decay = config.weight_decay;
  options.nesterov = config.nesterov;
  return optimizer_factory(config.optimizer, options);
}

/// In the words of the flags what `scheduled_lr` would say in those of its options.
void check_schedule(const RunConfig& config, int64_t total_steps) {
  const bool falls = config.schedule == "cosine" || config.schedule == "linear";
  if (!falls || total_steps == 0 || config.warmup_steps < total_steps) return;
  throw UsageError("--warmup-steps " + std::to_string(config.warmup_steps) +
                       " leaves nothing for --schedule " + config.schedule + ": the run has " +
                       counted(total_steps, "step"),
                   "give fewer --warmup-steps or more --max-epochs");
}

ScheduleOptions schedule_of(const RunConfig& config, int64_t steps) {
  ScheduleOptions schedule;
  schedule.name = config.schedule;
  schedule.warmup_steps = config.warmup_steps;
  schedule.total_steps = steps * config.max_epochs;
  check_schedule(config, schedule.total_steps);
  schedule.step_size = steps * config.lr_step_size;
  schedule.gamma = config.lr_gamma;
  schedule.min_lr = config.min_lr;
  return schedule;
}

/// The module of the run, its parameters drawn from the seed. `schedule` counts in training only.
std::shared_ptr<ModelTraining> make_module(const RunConfig& config, const World& world,
                                           ScheduleOptions schedule, ModelTask& made) {
  seed_everything(config.seed);
  const auto model = make_model(config.model);
  if (!config.load_weights.empty()) load_weights(*model, config.load_weights);
  model->to(world.device());
  made.memory_format = memory_format_of(config.memory_format, *model, world.device());
  set_memory_format(*model, made.memory_format);
  if (!threads_are_asked_for(config.threads) && world.device().is_cpu()) {
    at::set_num_threads(threads_worth_using(at::get_num_threads(), *model, config.batch_size));
  }
  for (const at::Tensor& parameter : model->parameters()) made.parameters += parameter.numel();
  ModelTrainingOptions options;
  options.loss = loss_of(model_info(config.model));
  options.optimizer = {.make = optimizer_of(config), .schedule = std::move(schedule)};
  options.memory_format = made.memory_format;
  return std::make_shared<ModelTraining>(model, std::move(options));
}

}  // namespace

void check_model_fits(const ModelInfo& model, const TensorDataset& dataset) {
  const auto product = [](at::IntArrayRef shape) {
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  };
  const int64_t wanted = product(model.input_shape);
  const int64_t given = product(dataset.data.sizes().slice(1));
  const std::string both = "model " + model.name + " and dataset " + dataset.name + ": ";
  const std::string hint = model.regression
                               ? "this model is for regression: try --dataset random"
                               : "this model is for images: try --dataset digits or mnist";
  if (wanted != given) {
    throw UsageError(both + "the model takes " + std::to_string(wanted) +
                         " numbers a sample, the dataset's samples have " + std::to_string(given),
                     hint);
  }
  const bool classes = dataset.num_classes > 0;
  if (model.regression == classes) {
    throw UsageError(both + "the model " +
                         (model.regression ? "is for regression, the dataset has classes"
                                           : "is for classes, the dataset is for regression"),
                     hint);
  }
  if (classes && dataset.num_classes > model.outputs) {
    throw UsageError(both + "the model tells " + std::to_string(model.outputs) +
                     " classes apart, the dataset has " + std::to_string(dataset.num_classes));
  }
  if (!classes && product(dataset.targets.sizes().slice(1)) != model.outputs) {
    throw UsageError(both + "the model gives " + std::to_string(model.outputs) +
                     " numbers a sample, the dataset's targets have " +
                     std::to_string(product(dataset.targets.sizes().slice(1))));
  }
}

DataLoader make_loader(const RunConfig& config, const World& world, const TensorDataset& dataset,
                       bool training) {
  const DataShare data =
      data_share(config.strategy, strategy_options(config), world.rank(), world.size());
  SamplerOptions sampler;
  sampler.dataset_size = dataset.size();
  sampler.rank = data.rank;
  sampler.world_size = data.size;
  sampler.shuffle = training;
  sampler.seed = config.seed;
  LoaderOptions options;
  options.batch_size = training ? config.batch_size : kEvaluationBatch;
  options.num_workers = static_cast<int>(config.num_workers);
  options.pin_memory = world.device().is_cuda();
  options.seed = config.seed;
  const DistributedSampler share(sampler);
  if (training && config.batch_size > share.samples_per_rank()) {
    throw UsageError("--batch-size " + std::to_string(config.batch_size) + " is larger than the " +
                         std::to_string(share.samples_per_rank()) + " samples that " +
                         (data.size > 1 ? "each of " + counted(data.size, "rank") + " has"
                                        : std::string("there are")) +
                         " of dataset " + dataset.name,
                     "give at most --batch-size " + std::to_string(share.samples_per_rank()));
  }
  return DataLoader(dataset, share, pipeline_for(dataset, model_info(config.model)), options);
}

int64_t steps_per_epoch(const RunConfig& config, int64_t batches_per_epoch) {
  const int64_t batches =
      std::min(batches_per_epoch, config.limit_train_batches.value_or(batches_per_epoch));
  return (batches + config.accumulate_grad_batches - 1) / config.accumulate_grad_batches;
}

// The stored part of a data set is freed as soon as nothing refers to it, so only what is needed is
// handed on.
ModelTask make_train_task(const RunConfig& config, const World& world) {
  set_up_process(config);
  const DatasetSplits splits = load_splits(config);
  check_model_fits(model_info(config.model), splits.train);
  DataLoader train = make_loader(config, world, splits.train, /*training=*/true);
  DataLoader test = make_loader(config, world, splits.test, /*training=*/false);
  ModelTask made;
  made.train_samples = splits.train.size();
  made.test_samples = splits.test.size();
  const int64_t steps = steps_per_epoch(config, train.batches_per_epoch());
  const auto module = make_module(config, world, schedule_of(config, steps), made);
  made.task = training_task(module, std::move(train), std::move(test));
  return made;
}

ModelTask make_evaluation_task(const RunConfig& config, const World& world) {
  set_up_process(config);
  const TensorDataset test = load_splits(config).test;
  check_model_fits(model_info(config.model), test);
  DataLoader loader = make_loader(config, world, test, /*training=*/false);
  ModelTask made;
  made.test_samples = test.size();
  const auto module = make_module(config, world, {}, made);
  made.task = training_task(module, std::move(loader));
  made.task.test = std::move(made.task.train);
  return made;
}

}  // namespace lockstep
