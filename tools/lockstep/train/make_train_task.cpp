#include "tools/lockstep/train/make_train_task.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/data/image_folder.h"
#include "lockstep/data/named_sets.h"
#include "lockstep/data/transforms.h"
#include "lockstep/models/models.h"
#include "lockstep/parallel/strategies/strategies.h"
#include "lockstep/train/memory_format.h"
#include "lockstep/train/model_training.h"
#include "lockstep/train/threads.h"
#include "lockstep/train/weights.h"
#include "tools/lockstep/train/placement.h"

namespace lockstep {
namespace {

bool is_text(const SampleSource& source) {
  return source.data_spec().dtype == at::kLong && source.target_spec().shape.size() == 1 &&
         source.num_classes() > 0;
}

/// Of the training images, as recipes for PyTorch have them.
TransformPtr normalize_for(const std::string& dataset) {
  if (dataset == "fashion-mnist") return normalize({0.2860}, {0.3530});
  if (dataset == "cifar10") return normalize({0.4914, 0.4822, 0.4465}, {0.2470, 0.2435, 0.2616});
  if (dataset.starts_with("folder:")) {
    return normalize({0.485, 0.456, 0.406}, {0.229, 0.224, 0.225});  // ImageNet's
  }
  return normalize();
}

/// Random crops and flips. A folder's images are larger for it; others are padded.
void add_augmentation(const RunConfig& config, const SampleSource& source,
                      std::vector<TransformPtr>& steps) {
  if (source.data_spec().dtype != at::kByte) {
    throw UsageError("--augment is for images of bytes, but the samples of dataset " +
                         source.name() + " are " + source.data_spec().describe(),
                     "leave --augment out");
  }
  constexpr int64_t kMargin = 4;  // of the recipes for CIFAR-10
  const bool larger = source.name().starts_with("folder:");
  steps.push_back(random_crop(
      larger ? RandomCropOptions{.height = config.image_size, .width = config.image_size}
             : RandomCropOptions{.padding = kMargin}));
  steps.push_back(random_horizontal_flip());
}

std::string hint_for(const ModelInfo& model, const SampleSource& source) {
  const SampleSpec spec = source.data_spec();
  const bool has_colours = spec.dtype == at::kByte && spec.shape.size() == 3 && spec.shape[0] == 3;
  if (has_colours && !model.any_image_size)
    return "the dataset has images of three colours: try --model resnet18";
  if (model.per_token) return "this model is for texts: try --dataset text:FILE";
  if (model.regression) return "this model is for regression: try --dataset random";
  if (model.any_image_size)
    return "this model is for images of three colours: try --dataset cifar10";
  return "this model is for images: try --dataset digits or mnist";
}

/// Shapes of single samples.
void check_shape(const ModelInfo& model, const SampleSource& source, const std::string& both) {
  const SampleSpec spec = source.data_spec();
  if (model.per_token != is_text(source)) {
    throw UsageError(
        both + (model.per_token ? "the model takes tokens of a text, the dataset is none"
                                : "the dataset is a text, which the model does not take"),
        model.per_token ? hint_for(model, source) : "--model gpt is for texts");
  }
  if (model.any_image_size) {
    if (spec.shape.size() == 3 && spec.shape[0] == model.input_shape.at(0)) return;
    throw UsageError(both + "the model takes images of " +
                         counted(model.input_shape.at(0), "channel") +
                         ", the dataset's samples are " + spec.describe(),
                     hint_for(model, source));
  }
  const int64_t wanted = SampleSpec{model.input_shape}.numel();
  if (wanted == spec.numel()) return;
  throw UsageError(both + "the model takes " + std::to_string(wanted) +
                       " numbers a sample, the dataset's samples have " +
                       std::to_string(spec.numel()),
                   hint_for(model, source));
}

DatasetOptions dataset_options(const RunConfig& config) {
  DatasetOptions options;
  options.data_dir = config.data_dir;
  options.download = config.download;
  return options;
}

/// The data set of a run, for its model: a text has windows of as many tokens as the model looks
/// at.
DatasetSources open_data(const RunConfig& config, const World& world) {
  DatasetOptions options = dataset_options(config);
  options.unpacked = unpacked_files();
  options.image_size = config.image_size;
  options.test_fraction = config.test_fraction;
  if (config.augment) options.train_image_size = config.image_size * 8 / 7;
  const ModelInfo model = model_info(config.model);
  if (model.per_token) options.context = model.input_shape.at(0);
  constexpr std::string_view kFolder = "folder:";
  if (!config.dataset.starts_with(kFolder)) return open_dataset(config.dataset, options);
  return open_image_folder(config.dataset.substr(kFolder.size()), options,
                           {config.on_bad_image == "skip" ? OnBadImage::skip : OnBadImage::stop,
                            static_cast<size_t>(world.rank()), static_cast<size_t>(world.size())});
}

/// What makes samples fit for the model. Images are normalised with the mean and deviation of their
/// data set, and with --augment cropped and flipped at random in training.
Compose transforms_for(const RunConfig& config, const ModelInfo& info, const SampleSource& source,
                       bool training) {
  std::vector<TransformPtr> steps;
  if (training && config.augment) add_augmentation(config, source, steps);
  if (source.data_spec().dtype == at::kByte) steps.push_back(normalize_for(source.name()));
  if (!info.from_file && !info.any_image_size) steps.push_back(reshape(info.input_shape));
  return Compose(std::move(steps));
}

/// What a TorchScript file is trained on decides how.
LossKind loss_of(const ModelInfo& info, const SampleSource& source) {
  const bool regression = info.from_file ? source.num_classes() == 0 : info.regression;
  return regression ? LossKind::mean_squared : LossKind::cross_entropy;
}

/// Samples of a batch in an evaluation. For models of small images 256: large enough that the cost
/// of a call does not count, and small enough that a ConvNet's activations stay a few MB. What is
/// large for one sample has the batch of training, which is known to fit in memory.
int64_t evaluation_batch(const RunConfig& config, const ModelInfo& info) {
  const bool small = !info.from_file && !info.any_image_size && !info.per_token;
  return small ? 256 : config.batch_size;
}

/// Throws UsageError when the model cannot take the data set's samples or tell its classes apart.
void check_model_fits(const ModelInfo& model, const SampleSource& source) {
  if (model.from_file) return;  // A batch tells; see check_output_fits.
  const std::string both = "model " + model.name + " and dataset " + source.name() + ": ";
  check_shape(model, source, both);
  const bool classes = source.num_classes() > 0;
  if (model.regression == classes) {
    throw UsageError(both + "the model " +
                         (model.regression ? "is for regression, the dataset has classes"
                                           : "is for classes, the dataset is for regression"),
                     hint_for(model, source));
  }
  if (classes && source.num_classes() > model.outputs) {
    throw UsageError(both + "the model tells " + std::to_string(model.outputs) +
                     " classes apart, the dataset has " + std::to_string(source.num_classes()));
  }
  const int64_t targets = source.target_spec().numel();
  if (!classes && targets != model.outputs) {
    throw UsageError(both + "the model gives " + std::to_string(model.outputs) +
                     " numbers a sample, the dataset's targets have " + std::to_string(targets));
  }
}

/// What a TorchScript file gives is known from a batch only. A copy of the model gets one of zeros,
/// because a traced one would learn from it. Throws UsageError when the output does not fit. Other
/// models pass.
void check_output_fits(const ModelInfo& info, const DataLoader& loader,
                       const SampleSource& source) {
  if (!info.from_file) return;
  constexpr int64_t kRows = 2;
  const at::NoGradGuard no_grad;
  const SampleSpec input = loader.data_spec();
  const std::vector<int64_t> shape = input.batch_shape(kRows);
  const auto model = make_model(info.name);
  model->eval();
  const at::Tensor output = model->forward(at::zeros(shape, input.dtype));
  std::vector<int64_t> expected = loader.target_spec().batch_shape(kRows);
  const bool classes = source.num_classes() > 0;
  if (classes) expected.push_back(source.num_classes());
  std::vector<int64_t> given = output.sizes().vec();
  const bool more = classes && given.size() == expected.size() && given.back() > expected.back();
  if (more) given.back() = expected.back();  // classes that do not occur do no harm
  if (given == expected && output.is_floating_point()) return;
  throw UsageError("model " + info.name + " and dataset " + source.name() + ": for a batch " +
                       c10::str(at::IntArrayRef(shape)) + " the model gives " +
                       c10::toString(output.scalar_type()) + " " + c10::str(output.sizes()) +
                       ", expected " + c10::str(at::IntArrayRef(expected)) +
                       (classes ? ", a number for each class" : ""),
                   classes ? "the model is to give logits, without softmax or argmax" : "");
}

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
    made.optimizer_state = load_python_optimizer(
        config.load_optimizer, *model,
        world.rank() == 0 ? python_settings(config) : std::map<std::string, double>());
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

std::map<std::filesystem::path, std::span<const std::byte>>& unpacked_files() {
  static std::map<std::filesystem::path, std::span<const std::byte>> files;
  return files;
}

void fetch_data(const RunConfig& config) {
  fetch_dataset(config.dataset, dataset_options(config));
}

int64_t steps_per_epoch(const RunConfig& config, int64_t batches_per_epoch) {
  const int64_t batches =
      std::min(batches_per_epoch, config.limit_train_batches.value_or(batches_per_epoch));
  return (batches + config.accumulate_grad_batches - 1) / config.accumulate_grad_batches;
}

// The stored part of a data set is freed as soon as nothing refers to it, so only what is needed is
// handed on.
ModelTask make_train_task(const RunConfig& config, const World& world, bool training) {
  set_up_process(config);
  DatasetSources data = open_data(config, world);
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
