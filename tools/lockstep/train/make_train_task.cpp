#include "tools/lockstep/train/make_train_task.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/parallel/strategies/strategies.h"
#include "lockstep/train/memory_format.h"
#include "lockstep/train/model_training.h"
#include "lockstep/train/threads.h"
#include "lockstep/train/weights.h"
#include "tools/lockstep/train/model_and_data.h"
#include "tools/lockstep/train/placement.h"

namespace lockstep {
namespace {

void set_up_process(const RunConfig& config) {
  if (config.deterministic) {
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
    at::globalContext().setBenchmarkCuDNN(false);
    at::globalContext().setDeterministicCuDNN(true);
    at::globalContext().setDeterministicMkldnn(true);
  }
}

OptimizerFactory optimizer_of(const RunConfig& wanted) {
  const RunConfig config = resolved(wanted);
  OptimizerOptions options;
  options.lr = *config.lr;
  options.momentum = *config.momentum;
  options.weight_decay = config.weight_decay;
  options.nesterov = config.nesterov;
  options.line_search_fn = config.line_search_fn;
  options.max_iter = config.max_iter.value_or(options.max_iter);
  options.history_size = config.history_size.value_or(options.history_size);
  return optimizer_factory(config.optimizer, options);
}

/// By the names of Python's param_groups.
std::map<std::string, double> python_settings(const RunConfig& wanted) {
  const RunConfig config = resolved(wanted);
  std::map<std::string, double> settings = {{"lr", *config.lr}};
  if (config.weight_decay) settings["weight_decay"] = *config.weight_decay;
  if (config.optimizer == "sgd") {
    settings["momentum"] = *config.momentum;
    settings["nesterov"] = config.nesterov ? 1 : 0;
  }
  return settings;
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

WeightsSelection selection_of(const RunConfig& config) {
  WeightsSelection selection;
  if (!config.load_only.empty()) selection.only = split(config.load_only, ',');
  if (!config.load_rename.empty()) selection.rename = split(config.load_rename, ',');
  return selection;
}

/// What of the model begins anew must be known, as its first predictions are worth nothing.
void tell_what_begins_anew(const RunConfig& config, const std::vector<std::string>& names,
                           int64_t classes) {
  constexpr size_t kShown = 4;
  if (names.empty()) return;
  const std::vector<std::string> first(names.begin(),
                                       names.begin() + std::min(kShown, names.size()));
  std::string text = join(first, ", ");
  if (names.size() > kShown) text += " and " + std::to_string(names.size() - kShown) + " more";
  if (config.load_only.empty()) {
    log_warning("a new output layer for " + counted(classes, "class") + " begins: " + text + ". " +
                config.load_weights + " has it for another number");
  } else {
    log_info("not loaded from " + config.load_weights + ": " + text);
  }
}

void start_from_weights(const RunConfig& config, const World& world, int64_t classes, bool training,
                        Model& model) {
  WeightsSelection selection = selection_of(config);
  selection.new_head = training && config.load_only.empty() && classes > 0;
  const auto names = load_weights(model, config.load_weights, selection);
  if (world.rank() == 0) tell_what_begins_anew(config, names, classes);
}

/// The module of the run, its parameters drawn from the seed.
void make_module(const RunConfig& config, const World& world, const SampleSource& source,
                 ScheduleOptions schedule, ModelTask& made) {
  const ModelInfo info = model_info(config.model, source.num_classes());
  check_output_fits(info, made.train.empty() ? made.validation.front() : made.train.front(),
                    source);
  at::manual_seed(config.seed);
  const auto model = make_model(config.model, source.num_classes());
  const bool training = !made.train.empty();
  if (!config.load_weights.empty())
    start_from_weights(config, world, source.num_classes(), training, *model);
  if (!config.freeze.empty() && training)
    made.frozen = freeze_parameters(*model, split(config.freeze, ','));
  if (!config.load_optimizer.empty() && training)
    made.optimizer_state =
        load_python_optimizer(config.load_optimizer, *model, python_settings(config));
  model->to(world.device());
  made.memory_format = memory_format_of(config.memory_format, *model, world.device());
  set_memory_format(*model, made.memory_format);
  if (!threads_are_asked_for(config.threads) && world.device().is_cpu()) {
    const int64_t uses =
        info.per_token ? info.input_shape.at(0) : 1;  // of the weights, by a sample
    // With logical shards bits must not depend on how many processes share the cores.
    at::set_num_threads(
        config.logical_shards > 0
            ? 1
            : threads_worth_using(at::get_num_threads(), *model, config.batch_size * uses));
  }
  for (const at::Tensor& parameter : model->parameters()) made.parameters += parameter.numel();
  ModelTrainingOptions options;
  options.loss = loss_of(info, source);
  options.optimizer = {.make = optimizer_of(config), .schedule = std::move(schedule)};
  options.memory_format = made.memory_format;
  made.module = std::make_shared<ModelTraining>(model, std::move(options));
}

/// A share of a part of a data set, made fit for the model.
DataLoader make_loader(const RunConfig& config, const World& world, const DataShare& data,
                       std::unique_ptr<SampleSource> source, bool training) {
  SamplerOptions sampler;
  sampler.dataset_size = source->size();
  sampler.rank = data.rank;
  sampler.world_size = data.size;
  sampler.shuffle = training;
  sampler.seed = config.seed;
  const ModelInfo info = model_info(config.model, source->num_classes());
  LoaderOptions options;
  options.batch_size = training ? config.batch_size : evaluation_batch(config, info);
  options.num_workers = static_cast<int>(config.num_workers);
  options.pin_memory = world.device().is_cuda();
  options.seed = config.seed;
  const DistributedSampler share(sampler);
  if (training && config.batch_size > share.samples_per_rank()) {
    throw UsageError(
        "--batch-size " + std::to_string(config.batch_size) + " is larger than the " +
            std::to_string(share.samples_per_rank()) + " samples that " +
            (data.size > 1
                 ? "each of " + counted(data.size, config.logical_shards > 0 ? "shard" : "rank") +
                       " has"
                 : std::string("there are")) +
            " of dataset " + source->name(),
        "give at most --batch-size " + std::to_string(share.samples_per_rank()));
  }
  Compose transforms = transforms_for(config, info, *source, training);
  return DataLoader(std::move(source), share, std::move(transforms), options);
}

/// This rank's share, by its strategy: with logical shards several.
std::vector<DataLoader> make_loaders(RunConfig config, const World& world,
                                     const std::unique_ptr<SampleSource>& source, bool training) {
  DataShare data =
      data_share(config.strategy, strategy_options(config), world.rank(), world.size());
  config.num_workers = (config.num_workers + data.count - 1) / data.count;
  std::vector<DataLoader> loaders;
  for (; data.count > 0; --data.count, ++data.rank)
    loaders.push_back(make_loader(config, world, data, source->clone(), training));
  return loaders;
}

}  // namespace

int64_t steps_per_epoch(const RunConfig& config, int64_t batches_per_epoch) {
  const int64_t batches =
      std::min(batches_per_epoch, config.limit_train_batches.value_or(batches_per_epoch));
  return (batches + config.accumulate_grad_batches - 1) / config.accumulate_grad_batches;
}

// The stored part of a data set is freed as soon as nothing refers to it, so only what is needed is
// handed on.
ModelTask make_train_task(const RunConfig& config, const World& world, bool training) {
  set_up_process(config);
  DatasetSources data = open_data(config);
  if (!training) data.train.reset();
  const std::unique_ptr<SampleSource> source = (training ? data.train : data.test)->clone();
  check_model_fits(model_info(config.model, source->num_classes()), *source);
  ModelTask made;
  made.test_samples = data.test->size();
  ScheduleOptions schedule;
  if (training) {
    made.train_samples = data.train->size();
    made.train = make_loaders(config, world, std::exchange(data.train, {}), /*training=*/true);
    schedule = schedule_of(config, steps_per_epoch(config, made.train.front().batches_per_epoch()));
  }
  made.validation = make_loaders(config, world, std::exchange(data.test, {}), /*training=*/false);
  make_module(config, world, *source, std::move(schedule), made);
  return made;
}

}  // namespace lockstep
