// Does in C++ what amp_parity_worker.py does in Python, on tensors that the script wrote, and
// writes the results for it to compare: lockstep_amp_parity CONFIG.json RANK SIZE
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <torch/nn/module.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "lockstep/amp/grad_scaler.h"
#include "lockstep/amp/precision.h"
#include "lockstep/autograd/activation_checkpoint.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/world.h"
#include "lockstep/data/safetensors.h"
#include "lockstep/models/models.h"
#include "lockstep/parallel/whole_model.h"

namespace {

using Json = nlohmann::json;
using lockstep::StateDict;
using Tensors = std::map<std::string, at::Tensor>;

Tensors load(const Json& config) {
  const auto tensors = lockstep::load_safetensors(config["input"].get<std::string>()).tensors;
  return {tensors.begin(), tensors.end()};
}

void save(const Json& config, const lockstep::World& world, const StateDict& tensors) {
  lockstep::save_safetensors(
      config["output"].get<std::string>() + "." + std::to_string(world.rank()), tensors);
}

at::Tensor number(double value) {
  return at::full({1}, value, at::kDouble);
}

lockstep::GradScalerOptions scaler_options(const Json& json) {
  lockstep::GradScalerOptions options;
  options.init_scale = json.value("init_scale", options.init_scale);
  options.growth_factor = json.value("growth_factor", options.growth_factor);
  options.backoff_factor = json.value("backoff_factor", options.backoff_factor);
  options.growth_interval = json.value("growth_interval", options.growth_interval);
  options.enabled = json.value("enabled", options.enabled);
  return options;
}

/// Steps on gradients "g.RANK.STEP", which each rank has its own of, through backward from a scaled
/// product with them. Writes the parameter, the scale and its count after each step.
void run_scaler(const Json& config, const lockstep::World& world) {
  const Tensors input = load(config);
  const at::Tensor parameter = input.at("p").clone().requires_grad_();
  const auto optimizer = lockstep::make_optimizer(config["optimizer"], {parameter},
                                                  {.lr = config["lr"].get<double>()});
  const bool sharded = config.value("sharded", false);
  const auto group = sharded ? world.group() : lockstep::ProcessGroup();
  auto scaler = std::make_unique<lockstep::GradScaler>(scaler_options(config["scaler"]), group);
  const int steps = config["steps"];
  StateDict output;
  for (int step = 0; step < steps; ++step) {
    const std::string suffix = std::to_string(step);
    lockstep::zero_grad({parameter});
    const at::Tensor gradient = input.at("g." + std::to_string(world.rank()) + "." + suffix);
    scaler->scale((parameter * gradient).sum()).backward();
    if (config.contains("max_norm")) {
      scaler->unscale_(*optimizer);
      output.emplace_back("norm." + suffix, number(scaler->clip_grad_norm_(
                                                *optimizer, config["max_norm"].get<double>())));
    }
    scaler->step(*optimizer);
    if (config.contains("new_scale") && step == steps / 3) {
      scaler->update(config["new_scale"].get<double>());
    } else {
      scaler->update();
    }
    if (config.value("reload", false) && step == steps / 2) {
      auto fresh = std::make_unique<lockstep::GradScaler>(lockstep::GradScalerOptions(), group);
      fresh->load_state_dict(scaler->state_dict());
      scaler = std::move(fresh);
    }
    output.emplace_back("p." + suffix, parameter.detach().clone());
    for (const auto& [name, tensor] : scaler->state_dict()) {
      output.emplace_back(name + "." + suffix, tensor);
    }
  }
  save(config, world, output);
}

/// Trains on this rank's part of "x" [steps, ranks, batch, ...] and "y", and writes the losses, the
/// norms, the scales, and the module's tensors at the end.
void train(const Json& config, const lockstep::World& world) {
  const Tensors data = load(config);
  at::manual_seed(config["seed"].get<uint64_t>());
  const auto model = lockstep::make_model(config["model"]);
  lockstep::Precision precision({.precision = config["precision"],
                                 .amp_level = config.value("level", ""),
                                 .loss_scale = config.value("loss_scale", "")});
  precision.convert(*model);
  lockstep::StrategySetup setup{
      .module = model,
      .make_optimizer = precision.optimizer_factory([&](std::vector<at::Tensor> parameters) {
        return lockstep::make_optimizer("sgd", std::move(parameters),
                                        {.lr = config["lr"].get<double>(), .momentum = 0.9});
      }),
      .group = world.group(),
      .options = {.forward_context = precision.forward_context()}};
  const auto strategy = lockstep::make_ddp_strategy(setup);
  const auto forward = [&](const at::Tensor& x) {
    if (!config.value("checkpointed", false)) return model->forward(x);
    return lockstep::checkpoint([&](const at::Tensor& in) { return model->forward(in); }, x);
  };
  const int accumulate = config.value("accumulate", 1);
  StateDict output;
  const auto put = [&](const char* name, int64_t step, const at::Tensor& tensor) {
    output.emplace_back(std::string(name) + "." + std::to_string(step), tensor);
  };
  for (int64_t step = 0; step < data.at("x").size(0); ++step) {
    const at::Tensor x = data.at("x")[step][world.rank()], y = data.at("y")[step][world.rank()];
    const bool last = (step + 1) % accumulate == 0;
    const auto loss = [&] {
      const at::Tensor out = precision.convert_output(forward(precision.convert_input(x)));
      const at::Tensor value = at::cross_entropy_loss(out, y);
      put("loss", step, value.detach().reshape({1}));
      return precision.scale(value / accumulate);
    };
    strategy->run_batch({.loss = loss, .last_of_step = last});
    if (!last) continue;
    const auto scale = precision.unscale(strategy->gradients());
    if (config.contains("max_norm")) {
      const double norm = precision.clip_grad_norm(
          config["max_norm"], [&](double max) { return strategy->clip_grad_norm(max); });
      put("norm", step, number(norm));
    }
    strategy->step(scale);
    strategy->zero_grad();
    precision.update();
    put("scale", step, number(precision.loss_scale()));
  }
  for (const auto& item : model->named_parameters()) output.emplace_back(item.key(), item.value());
  for (const auto& item : model->named_buffers()) output.emplace_back(item.key(), item.value());
  save(config, world, output);
}

void run(const Json& config, int rank, int size) {
  at::set_num_threads(1);
  lockstep::InitOptions options;
  options.backend = "gloo";
  options.init_method = "file://" + config["meet"].get<std::string>();
  options.rank = rank;
  options.world_size = size;
  auto world = lockstep::init(options);
  for (const Json& job : config["runs"]) {
    job["mode"] == "scaler" ? run_scaler(job, world) : train(job, world);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 4) {
      throw lockstep::UsageError("usage: lockstep_amp_parity CONFIG.json RANK SIZE");
    }
    run(Json::parse(std::ifstream(argv[1])), std::stoi(argv[2]), std::stoi(argv[3]));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lockstep_amp_parity: %s\n", error.what());
    return lockstep::exit_code_of(error);
  }
}
