#include "tools/lockstep/bench/step_bench.h"

#include <ATen/ATen.h>

#include <torch/cuda.h>
#include <nlohmann/json.hpp>
#include <optional>

#include "lockstep/optim/optim.h"
#include "lockstep/parallel/strategies/strategies.h"
#include "lockstep/train/loss.h"
#include "lockstep/train/memory_format.h"
#include "lockstep/train/model_training.h"

namespace lockstep::tool {
namespace {

/// As the Python twins have it.
OptimizerFactory bench_optimizer_factory(const std::string& name) {
  OptimizerOptions options;
  options.lr = default_learning_rate(name);
  if (name == "sgd") {
    options.lr = 0.01;
    options.momentum = 0.9;
  }
  return [name, options](std::vector<at::Tensor> parameters) {
    return make_optimizer(name, std::move(parameters), options);
  };
}

}  // namespace

std::shared_ptr<Model> seeded_model(const std::string& name) {
  at::manual_seed(0);
  return make_model(name);
}

StepBench::StepBench(const nlohmann::json& config, const World& world)
    : info_(model_info(config.at("model"))),
      batch_(config.at("batch_size")),
      device_(world.device()),
      precision_({.precision = config.at("precision"), .device = device_}),
      model_(seeded_model(config.at("model"))) {
  model_->to(device_);
  precision_.convert(*model_);
  format_ = memory_format_of("auto", *model_, device_);
  set_memory_format(*model_, format_);
  StrategySetup setup;
  setup.module = model_;
  setup.layers = layers_of(*model_);
  setup.forward = [](torch::nn::Module& copy, const at::Tensor& input) {
    return dynamic_cast<Model&>(copy).forward(input);
  };
  setup.make_optimizer =
      precision_.optimizer_factory(bench_optimizer_factory(config.at("optimizer")));
  setup.options.forward_context = precision_.forward_context();
  setup.example_input = [this] {
    const auto zeros = at::device(device_).dtype(info_.per_token ? at::kLong : at::kFloat);
    const at::Tensor batch = at::zeros(SampleSpec{info_.input_shape}.batch_shape(batch_), zeros);
    return precision_.convert_input(with_memory_format(batch, format_));
  };
  setup.group = world.group();
  setup.device = device_;
  strategy_ = make_strategy(config.at("strategy"), setup);
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
  const LossKind kind = info_.regression ? LossKind::mean_squared : LossKind::cross_entropy;
  return precision_.scale(batch_loss(kind, precision_.convert_output(output), target));
}

BatchWork StepBench::work() {
  const at::Tensor input = precision_.convert_input(x_);
  return {.loss = [this, input] { return criterion(model_->forward(input), y_); },
          .input = input,
          .target = y_,
          .criterion = [this](const at::Tensor& output,
                              const at::Tensor& target) { return criterion(output, target); }};
}

void StepBench::update() {
  const StepScale scale =
      precision_.unscale(precision_.scales() ? strategy_->gradients() : std::vector<at::Tensor>(),
                         strategy_->has_sharded_gradients() ? strategy_->group() : ProcessGroup());
  strategy_->step(scale);
  precision_.update();
}

void StepBench::step(StateBytes* kept) {
  strategy_->zero_grad();
  strategy_->run_batch(work());
  if (kept) *kept = strategy_->state_bytes();
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
    strategy_->run_batch(batch);
  }
  const auto part = profiler.part(StepPart::optimizer);
  update();
  strategy_->zero_grad();
}

TensorDataset StepBench::random_samples(int64_t of_each) const {
  const int64_t samples = of_each * strategy_->data_share().size;
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
  const DataShare share = strategy_->data_share();
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
