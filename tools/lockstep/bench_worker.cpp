#include <ATen/ATen.h>
#include <torch/nn/functional/loss.h>

#include <algorithm>
#include <chrono>

#include "bench.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/comm/world.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/loader.h"
#include "lockstep/models/models.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/train/memory_format.h"

namespace lockstep::tool {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::json;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Calls `run` some times, then `steps` times by the clock: the same as the Python twins'.
template <class Run>
double median_us(Run run, int64_t warmup, int64_t steps) {
  for (int64_t i = 0; i < warmup; ++i) run();
  std::vector<double> times;
  for (int64_t i = 0; i < steps; ++i) {
    const auto start = Clock::now();
    run();
    times.push_back(seconds_since(start) * 1e6);
  }
  return median(std::move(times));
}

World join_group(const Json& config) {
  InitOptions options;
  options.backend = config.at("backend");
  options.init_method = config.at("init_method");
  return init(options);
}

Json run_step(const Json& config) {
  const World world = join_group(config);
  const std::string name = config.at("model");
  const ModelInfo& info = model_info(name);
  at::manual_seed(0);
  const auto model = make_model(name);
  model->to(world.device());
  const auto format = memory_format_of("auto", *model, world.device());
  set_memory_format(*model, format);
  DistributedDataParallel ddp(model, world.group());
  const auto parameters = model->parameters();
  const auto optimizer = make_optimizer("sgd", parameters, {.lr = 0.01, .momentum = 0.9});

  const int64_t batch = config.at("batch_size");
  std::vector<int64_t> shape = {batch};
  shape.insert(shape.end(), info.input_shape.begin(), info.input_shape.end());
  const auto x = with_memory_format(at::rand(shape).to(world.device()), format);
  const auto y = (info.regression ? at::rand({batch, info.outputs})
                                  : at::randint(info.outputs, {batch}, at::kLong))
                     .to(world.device());
  const auto step = [&] {
    zero_grad(parameters);
    const auto output = ddp.forward(x);
    const auto loss = info.regression ? torch::nn::functional::mse_loss(output, y)
                                      : torch::nn::functional::cross_entropy(output, y);
    loss.backward();
    optimizer->step();
  };
  return {{"us_per_step", median_us(step, config.at("warmup"), config.at("steps"))}};
}

Json run_allreduce(const Json& config) {
  const World world = join_group(config);
  Json p50 = Json::array();
  for (const auto& row : config.at("sizes")) {
    auto tensor = at::zeros({row.at("bytes").get<int64_t>() / 4}, world.device());
    p50.push_back(
        median_us([&] { world.group().all_reduce(tensor); }, config.at("warmup"), row.at("steps")));
  }
  return {{"p50_us", p50}};
}

Json run_loader(const Json& config) {
  DatasetOptions options;
  options.data_dir = config.at("folder").get<std::string>();
  const auto dataset = load_dataset("mnist", options).train;
  LoaderOptions loader_options;
  loader_options.batch_size = config.at("batch_size");
  loader_options.num_workers = config.at("workers");
  DataLoader loader(dataset, DistributedSampler({.dataset_size = dataset.size()}),
                    {lockstep::normalize()}, loader_options);
  const auto samples_per_second = [&](int64_t epoch, int64_t batches) {
    const auto start = Clock::now();
    int64_t samples = 0;
    for (const auto& batch : loader.epoch(epoch)) {
      if (batch.index >= batches) break;
      samples += batch.size();
    }
    return static_cast<double>(samples) / seconds_since(start);
  };
  samples_per_second(0, config.at("warmup"));
  std::vector<double> rates;
  for (int64_t i = 0; i < config.at("epochs").get<int64_t>(); ++i) {
    rates.push_back(samples_per_second(1 + i, config.at("batches")));
  }
  return {{"samples_per_s", median(std::move(rates))}};
}

/// Meets the others, sums one number, and ends.
void run_launch(const Json& config) {
  const World world = init({.backend = config.at("backend")});
  auto one = at::ones({1}, world.device());
  world.group().all_reduce(one);
  if (one.item<double>() != world.size()) {
    throw CommError("an all-reduce of ones over " + std::to_string(world.size()) + " ranks gave " +
                    std::to_string(one.item<double>()));
  }
}

}  // namespace

int bench_worker(const std::string& text) {
  const Json config = Json::parse(text);
  const std::string kind = config.at("kind");
  Json result;
  if (kind == "step") {
    result = run_step(config);
  } else if (kind == "allreduce") {
    result = run_allreduce(config);
  } else if (kind == "loader") {
    result = run_loader(config);
  } else if (kind == "launch") {
    run_launch(config);
    return 0;
  } else {
    throw UsageError("unknown kind of benchmark '" + kind + "'");
  }
  if (env_int("RANK").value_or(env_int("OMPI_COMM_WORLD_RANK").value_or(0)) == 0) {
    write_file_atomically(config.at("result").get<std::string>(), result.dump());
  }
  return 0;
}

}  // namespace lockstep::tool
