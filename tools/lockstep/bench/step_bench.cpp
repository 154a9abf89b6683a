#include "tools/lockstep/bench/step_bench.h"

#include <ATen/ATen.h>

#include <torch/cuda.h>
#include <nlohmann/json.hpp>
#include <optional>

#include "lockstep/optim/optim.h"
#include "lockstep/train/memory_format.h"
#include "lockstep/train/model_training.h"

namespace lockstep::tool {
namespace {

/// As the Python twins have it.
OptimizerFactory bench_optimizer_factory(const std::string& name) {
  OptimizerOptions options;
  options.lr = name == "sgd" ? 0.01 : default_learning_rate(name);
  if (name == "sgd") options.momentum = 0.9;
  return optimizer_factory(name, options);
}

}  // namespace

std::shared_ptr<Model> seeded_model(const std::string& name) {
  at::manual_seed(0);
  return make_model(name);
}

StepBench::StepBench(const PlainJson& config, const World& world)
    : info_(model_info(config.at("model"))),
      batch_(config.at("batch_size")),
      device_(world.device()),
      model_(seeded_model(config.at("model"))) {
  model_->to(device_);
  format_ = memory_format_of("auto", *model_, device_);
  set_memory_format(*model_, format_);
  ModelTrainingOptions training;
  training.loss = info_.regression ? LossKind::mean_squared : LossKind::cross_entropy;
  training.optimizer.make = bench_optimizer_factory(config.at("optimizer"));
  module_ = std::make_shared<ModelTraining>(model_, training);
  TrainerOptions options;
  options.precision.precision = config.at("precision");
  options.strategy = config.at("strategy");
  options.strategy_options.mesh = config.value("mesh", "");
  const auto zeros = [this] {
    const auto dtype = at::device(device_).dtype(info_.per_token ? at::kLong : at::kFloat);
    return with_memory_format(at::zeros(SampleSpec{info_.input_shape}.batch_shape(batch_), dtype),
                              format_);
  };
  part_ = std::move(
      detail::make_parts(module_, world.group(), device_, options, /*steps_of_run=*/1, zeros)
          .front());
}

at::Tensor StepBench::draw_targets(int64_t samples) const {
  if (info_.regression) return at::rand({samples, info_.outputs});
  return info_.per_token ? at::randint(info_.outputs, {samples, info_.input_shape.at(0)}, at::kLong)
                         : at::randint(info_.outputs, {samples}, at::kLong);
}

void StepBench::draw_batch() {
  const SampleSpec sample{info_.input_shape};
  const at::Tensor x = info_.per_token
                           ? at::randint(info_.outputs, sample.batch_shape(batch_), at::kLong)
                           : at::rand(sample.batch_shape(batch_));
  x_ = with_memory_format(x.to(device_), format_);
  y_ = draw_targets(batch_).to(device_);
}

at::Tensor StepBench::criterion(const at::Tensor& output, const at::Tensor& target) const {
  Precision& precision = part_->precision();
  return precision.scale(module_->loss(precision.convert_output(output), target));
}

BatchWork StepBench::work() {
  const at::Tensor input = part_->precision().convert_input(x_);
  return {.loss = [this, input] { return criterion(model_->forward(input), y_); },
          .input = input,
          .target = y_,
          .criterion = [this](const at::Tensor& output,
                              const at::Tensor& target) { return criterion(output, target); }};
}

void StepBench::update() {
  Precision& precision = part_->precision();
  const auto gradients = precision.scales() ? strategy().gradients() : std::vector<at::Tensor>();
  strategy().step(precision.unscale(
      gradients, strategy().has_sharded_gradients() ? strategy().group() : ProcessGroup()));
  precision.update();
}

void StepBench::step(StateBytes* kept) {
  strategy().zero_grad();
  strategy().run_batch(work());
  if (kept) *kept = strategy().state_bytes();
  update();
  if (device_.is_cuda()) torch::cuda::synchronize(device_.index());
}

void StepBench::profiled_step(StepProfiler& profiler, DataLoader& loader) {
  const auto step = profiler.step();
  {
    const auto part = profiler.part(StepPart::data);
    take_batch(loader);
  }
  {
    // A strategy runs backward as soon as it has the loss.
    std::optional<StepProfiler::Mark> part(profiler.part(StepPart::forward));
    BatchWork batch = work();
    batch.loss = [&, forward = std::move(batch.loss)] {
      at::Tensor loss = forward();
      part.reset();
      part.emplace(profiler.part(StepPart::backward));
      return loss;
    };
    strategy().run_batch(batch);
  }
  const auto part = profiler.part(StepPart::optimizer);
  update();
  strategy().zero_grad();
}

StepProfile StepBench::profile(DataLoader& loader, int64_t steps,
                               const StepProfilerOptions& options) {
  StepProfiler profiler(strategy().group(), options);
  for (int64_t i = 0; i < steps; ++i) profiled_step(profiler, loader);
  return profiler.finish();
}

TensorDataset StepBench::random_samples(int64_t of_each) const {
  const int64_t samples = of_each * strategy().data_share().size;
  const std::vector<int64_t> shape = SampleSpec{info_.input_shape}.batch_shape(samples);
  TensorDataset dataset;
  dataset.name = "random";
  dataset.targets = draw_targets(samples);
  dataset.num_classes = info_.regression ? 0 : info_.outputs;
  if (info_.regression) {
    dataset.data = at::rand(shape);
  } else if (info_.per_token) {
    dataset.data = at::randint(info_.outputs, shape, at::kLong);
  } else {
    const bool flat = info_.input_shape.size() == 1;
    dataset.data = at::randint(256, flat ? at::IntArrayRef({samples, 28, 28}) : shape, at::kByte);
  }
  return dataset;
}

DataLoader StepBench::make_loader(const TensorDataset& dataset) const {
  const DataShare share = strategy().data_share();
  LoaderOptions options;
  options.batch_size = batch_;
  const SamplerOptions sampler = {
      .dataset_size = dataset.size(), .rank = share.rank, .world_size = share.size};
  Compose transforms;
  if (!info_.regression && !info_.per_token)
    transforms = Compose({normalize(), reshape(info_.input_shape)});
  return DataLoader(dataset, DistributedSampler(sampler), std::move(transforms), options);
}

void StepBench::take_batch(DataLoader& loader) {
  Batch batch;
  while (!loader.next(batch)) loader.epoch(epoch_++);
  x_ = with_memory_format(batch.data.to(device_), format_);
  y_ = batch.target.to(device_);
}

int64_t StepBench::parameters() const {
  int64_t elements = 0;
  for (const at::Tensor& parameter : model_->parameters()) elements += parameter.numel();
  return elements;
}

}  // namespace lockstep::tool
