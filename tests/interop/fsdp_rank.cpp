// A rank that trains with a strategy, as fsdp_worker.py does with Python's:
// lockstep_fsdp_rank CONFIG.json RANK SIZE
#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"
#include "lockstep/comm/world.h"
#include "lockstep/data/safetensors.h"
#include "lockstep/models/models.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/whole_model.h"

namespace {

using Json = nlohmann::json;
using lockstep::StateDict;

std::unique_ptr<lockstep::Strategy> make_strategy(const Json& config,
                                                  const std::shared_ptr<lockstep::Model>& model,
                                                  const lockstep::World& world) {
  lockstep::StrategySetup setup;
  setup.module = model;
  setup.group = world.group();
  setup.make_optimizer = [&](std::vector<at::Tensor> parameters) {
    lockstep::OptimizerOptions options;
    options.lr = config["lr"];
    return lockstep::make_optimizer("adam", std::move(parameters), options);
  };
  if (config.value("strategy", "fsdp") == "ddp") return lockstep::make_ddp_strategy(setup);
  lockstep::FsdpOptions& options = setup.options.fsdp.emplace();
  options.units = config.value("units", options.units);
  options.reshard_after_forward = config.value("reshard", true);
  options.share_memory = config.value("share_memory", true);
  if (config.value("bfloat16", false)) {
    options.parameter_dtype = at::kBFloat16;
    options.reduce_dtype = at::kFloat;
  }
  return lockstep::make_fsdp_strategy(setup);
}

at::Tensor loss_of(const Json& config, const at::Tensor& output, const at::Tensor& target) {
  // As the worker in Python does, outside of the module.
  const at::Tensor logits = output.to(at::kFloat);
  return at::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}), target.reshape({-1}));
}

/// Trains on this rank's part of "x" [steps, ranks, batch, ...] and "y". Writes the losses, and on
/// rank 0 the parameters at the end, to OUTPUT.RANK.
void train(const Json& config, const lockstep::World& world) {
  const StateDict input = lockstep::load_safetensors(config["input"].get<std::string>()).tensors;
  const std::map<std::string, at::Tensor> data(input.begin(), input.end());
  at::manual_seed(config["seed"].get<uint64_t>());
  auto model = lockstep::make_model(config["model"]);
  const auto strategy = make_strategy(config, model, world);
  std::vector<float> losses;
  for (int64_t step = 0; step < data.at("x").size(0); ++step) {
    const at::Tensor x = data.at("x")[step][world.rank()], y = data.at("y")[step][world.rank()];
    at::Tensor loss;
    strategy->run_batch({.loss = [&] { return loss = loss_of(config, model->forward(x), y); }});
    losses.push_back(loss.item<float>());
    if (config.contains("max_norm")) strategy->clip_grad_norm(config["max_norm"]);
    strategy->step();
    strategy->zero_grad();
  }
  StateDict output{{"losses", at::tensor(losses)}};
  for (const auto& [name, tensor] : strategy->model_state()) output.emplace_back(name, tensor);
  lockstep::save_safetensors(
      config["output"].get<std::string>() + "." + std::to_string(world.rank()), output);
}

/// Prints the median time of a step in microseconds, and the bytes of this rank's state.
void time_steps(const Json& config, const lockstep::World& world) {
  auto model = lockstep::make_model(config["model"]);
  const auto strategy = make_strategy(config, model, world);
  const StateDict input = lockstep::load_safetensors(config["input"].get<std::string>()).tensors;
  const std::map<std::string, at::Tensor> data(input.begin(), input.end());
  const at::Tensor x = data.at("x")[0][0], y = data.at("y")[0][0];
  std::vector<double> times;
  const int warmup = config["warmup"], steps = config["steps"];
  for (int step = 0; step < warmup + steps; ++step) {
    const auto start = std::chrono::steady_clock::now();
    strategy->run_batch({.loss = [&] { return loss_of(config, model->forward(x), y); }});
    strategy->step();
    strategy->zero_grad();
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
    if (step >= warmup) times.push_back(time.count());
    if (step == warmup) {
      std::puts("trains");
      std::fflush(stdout);
    }
  }
  std::sort(times.begin(), times.end());
  if (world.rank() != 0) return;
  std::printf("%s %s %.1f %lld\n", config["model"].get<std::string>().c_str(),
              strategy->name().c_str(), times[times.size() / 2],
              static_cast<long long>(strategy->state_bytes().total()));
}

void run(const Json& config, int rank, int size) {
  at::set_num_threads(1);
  lockstep::InitOptions options;
  options.backend = config.value("backend", "gloo");
  options.init_method = "file://" + config["meet"].get<std::string>();
  options.rank = rank;
  options.world_size = size;
  auto world = lockstep::init(options);
  for (const Json& job : config["runs"]) {
    config["mode"] == "time" ? time_steps(job, world) : train(job, world);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 4) throw lockstep::UsageError("usage: lockstep_fsdp_rank CONFIG.json RANK SIZE");
    run(Json::parse(std::ifstream(argv[1])), std::stoi(argv[2]), std::stoi(argv[3]));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lockstep_fsdp_rank: %s\n", error.what());
    return lockstep::exit_code_of(error);
  }
}
