#include <ATen/ATen.h>
#include <torch/nn/functional/loss.h>

#include <optional>

#include "lockstep/autograd/backward.h"
#include "lockstep/data/loader.h"
#include "lockstep/models/models.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/train/memory_format.h"
#include "lockstep/train/step_profiler.h"
#include "tools/lockstep/bench/worker.h"

namespace lockstep::tool {
namespace {

using Json = nlohmann::json;

/// What a training step works with, and the step itself.
class StepBench {
 public:
  StepBench(const Json& config, const World& world)
      : info_(model_info(config.at("model"))),
        batch_(config.at("batch_size")),
        device_(world.device()),
        model_(seeded_model(info_.name)) {
    model_->to(device_);
    format_ = memory_format_of("auto", *model_, device_);
    set_memory_format(*model_, format_);
    ddp_.emplace(model_, world.group());
    parameters_ = model_->parameters();
    optimizer_ = make_optimizer("sgd", parameters_, {.lr = 0.01, .momentum = 0.9});
  }

  /// A batch that stays, as the Python twin's.
  void draw_batch() {
    const SampleSpec sample{info_.input_shape};
    x_ = with_memory_format(at::rand(sample.batch_shape(batch_)).to(device_), format_);
    y_ = (info_.regression ? at::rand({batch_, info_.outputs})
                           : at::randint(info_.outputs, {batch_}, at::kLong))
             .to(device_);
  }

  void step() {
    zero_grad(parameters_);
    backward(loss());
    optimizer_->step();
  }

  /// The same with a new batch from a loader, as `lockstep train` has it.
  void profiled_step(StepProfiler& profiler, DataLoader& loader) {
    const auto step = profiler.step();
    {
      const auto part = profiler.part(StepPart::data);
      take_batch(loader);
    }
    at::Tensor value;
    {
      const auto part = profiler.part(StepPart::forward);
      value = loss();
    }
    {
      const auto part = profiler.part(StepPart::backward);
      backward(value);
    }
    const auto part = profiler.part(StepPart::optimizer);
    optimizer_->step();
    zero_grad(parameters_);
  }

  /// Gives full batches only: a short one would be another step.
  DataLoader make_loader(const World& world) const {
    constexpr int64_t kBatches = 16;
    const int64_t samples = kBatches * batch_ * world.size();
    TensorDataset dataset;
    dataset.name = "bench";
    Pipeline transforms;
    if (info_.regression) {
      dataset.data = at::rand({samples, info_.input_shape.at(0)});
      dataset.targets = at::rand({samples, info_.outputs});
    } else {
      dataset.data = at::randint(256, {samples, 28, 28}, at::kByte);
      dataset.targets = at::randint(info_.outputs, {samples}, at::kLong);
      dataset.num_classes = info_.outputs;
      transforms = Pipeline({normalize(), reshape(info_.input_shape)});
    }
    LoaderOptions options;
    options.batch_size = batch_;
    const SamplerOptions sampler = {
        .dataset_size = samples, .rank = world.rank(), .world_size = world.size()};
    return DataLoader(dataset, DistributedSampler(sampler), std::move(transforms), options);
  }

 private:
  static std::shared_ptr<Model> seeded_model(const std::string& name) {
    at::manual_seed(0);
    return make_model(name);
  }

  at::Tensor loss() {
    const auto output = ddp_->forward(x_);
    return info_.regression ? torch::nn::functional::mse_loss(output, y_)
                            : torch::nn::functional::cross_entropy(output, y_);
  }

  void take_batch(DataLoader& loader) {
    Batch batch;
    while (!loader.next(batch)) loader.epoch(epoch_++);
    x_ = with_memory_format(batch.data.to(device_), format_);
    y_ = batch.target.to(device_);
  }

  const ModelInfo& info_;
  const int64_t batch_;
  const c10::Device device_;
  std::shared_ptr<Model> model_;
  at::MemoryFormat format_ = at::MemoryFormat::Contiguous;
  std::optional<DistributedDataParallel<std::shared_ptr<Model>>> ddp_;
  std::vector<at::Tensor> parameters_;
  std::unique_ptr<Optimizer> optimizer_;
  at::Tensor x_;
  at::Tensor y_;
  int64_t epoch_ = 0;
};

Json run_profile(const Json& config, const World& world, StepBench& bench) {
  DataLoader loader = bench.make_loader(world);
  const auto run = [&](const StepProfilerOptions& options, int64_t steps) {
    StepProfiler profiler(world.group(), options);
    for (int64_t i = 0; i < steps; ++i) bench.profiled_step(profiler, loader);
    return profiler.finish();
  };
  run({}, config.at("warmup"));
  StepProfilerOptions options;
  options.operations = config.at("operations");
  const StepProfile own = run(options, config.at("steps"));
  std::vector<StepBreakdown> steps = analyse(own).steps;
  Json result = {{"us_per_step", typical_step(steps).step},
                 {"backend", world.group().backend()},
                 {"profiles", Json::array()}};
  for (auto& profile : world.group().gather_object(to_object(own), 0)) {
    result["profiles"].push_back(std::move(profile));
  }
  return result;
}

}  // namespace

Json bench_step_worker(const Json& config) {
  const World world = join_group(config);
  StepBench bench(config, world);
  if (config.value("profile", false)) return run_profile(config, world, bench);
  bench.draw_batch();
  return {
      {"us_per_step", median_us([&] { bench.step(); }, config.at("warmup"), config.at("steps"))}};
}

}  // namespace lockstep::tool
