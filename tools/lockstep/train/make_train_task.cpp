#include "tools/lockstep/train/make_train_task.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <numeric>

#include "lockstep/base/error.h"
#include "lockstep/base/words.h"
#include "lockstep/train/memory_format.h"
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

std::unique_ptr<Optimizer> make_optimizer_for(const RunConfig& config, const Model& model) {
  OptimizerOptions options;
  options.lr = config.lr.value_or(default_lr(config.optimizer, config.model));
  options.momentum = config.momentum.value_or(default_momentum(config.optimizer));
  options.weight_decay = config.weight_decay;
  options.nesterov = config.nesterov;
  return make_optimizer(config.optimizer, model.parameters(), options);
}

/// The stored part of a data set is freed as soon as nothing refers to it, so only what is needed
/// is handed on.
TrainTask task_with_model(const RunConfig& config, const World& world) {
  TrainTask task;
  task.device = world.device();
  seed_everything(config.seed);
  task.model = make_model(config.model);
  task.loss = loss_of(model_info(config.model));
  if (!config.load_weights.empty()) load_weights(*task.model, config.load_weights);
  task.model->to(task.device);
  task.memory_format = memory_format_of(config.memory_format, *task.model, task.device);
  set_memory_format(*task.model, task.memory_format);
  if (!threads_are_asked_for(config.threads) && task.device.is_cpu()) {
    at::set_num_threads(threads_worth_using(at::get_num_threads(), *task.model, config.batch_size));
  }
  return task;
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

std::unique_ptr<DataLoader> make_loader(const RunConfig& config, const World& world,
                                        const TensorDataset& dataset, bool training) {
  SamplerOptions sampler;
  sampler.dataset_size = dataset.size();
  sampler.rank = world.rank();
  sampler.world_size = world.size();
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
                         (world.size() > 1 ? "each of " + counted(world.size(), "rank") + " has"
                                           : std::string("there are")) +
                         " of dataset " + dataset.name,
                     "give at most --batch-size " + std::to_string(share.samples_per_rank()));
  }
  return std::make_unique<DataLoader>(dataset, share,
                                      pipeline_for(dataset, model_info(config.model)), options);
}

TrainTask make_train_task(const RunConfig& config, const World& world) {
  set_up_process(config);
  const DatasetSplits splits = load_splits(config);
  check_model_fits(model_info(config.model), splits.train);
  auto train = make_loader(config, world, splits.train, /*training=*/true);
  auto test = make_loader(config, world, splits.test, /*training=*/false);
  TrainTask task = task_with_model(config, world);
  task.optimizer = make_optimizer_for(config, *task.model);
  task.train = std::move(train);
  task.test = std::move(test);
  return task;
}

TrainTask make_evaluation_task(const RunConfig& config, const World& world) {
  set_up_process(config);
  const TensorDataset test = load_splits(config).test;
  check_model_fits(model_info(config.model), test);
  auto loader = make_loader(config, world, test, /*training=*/false);
  TrainTask task = task_with_model(config, world);
  task.test = std::move(loader);
  return task;
}

}  // namespace lockstep
