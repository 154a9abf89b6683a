// Does in C++ what the test scripts beside it do in Python, on tensors that the script wrote, and
// writes the results for it to compare: lockstep_parity CONFIG.json [RANK SIZE]
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "lockstep/autograd/activation_checkpoint.h"
#include "lockstep/autograd/backward.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/world.h"
#include "lockstep/data/safetensors.h"
#include "lockstep/models/models.h"
#include "lockstep/optim/averaged_model.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/averaging/averagers.h"
#include "lockstep/parallel/comm_hooks/power_sgd_hook.h"
#include "lockstep/parallel/ddp.h"

namespace {

using Json = nlohmann::json;
using lockstep::StateDict;

void make_initial_model(const Json& config) {
  at::manual_seed(config["seed"].get<uint64_t>());
  const auto model = lockstep::make_model(config["model"]);
  StateDict tensors;
  for (const auto& item : model->named_parameters()) tensors.emplace_back(item.key(), item.value());
  for (const auto& item : model->named_buffers()) tensors.emplace_back(item.key(), item.value());
  lockstep::save_safetensors(config["output"].get<std::string>(), tensors);
}

void run_model(const Json& config) {
  const auto model = lockstep::make_model(config["model"]);
  model->eval();
  at::Tensor input;
  const c10::AutoGradMode no_grad(false);
  for (const auto& [name, tensor] :
       lockstep::load_safetensors(config["input"].get<std::string>()).tensors) {
    if (name == "input") {
      input = tensor;
    } else if (auto* parameter = model->named_parameters().find(name)) {
      parameter->copy_(tensor);
    } else {
      model->named_buffers()[name].copy_(tensor);
    }
  }
  lockstep::save_safetensors(config["output"].get<std::string>(),
                             {{"output", model->forward(input)}});
}

/// Trains a fresh model on "x" [steps, batch, ...] and "y" by plain SGD; writes the losses and the
/// module's tensors.
void run_steps(const Json& config) {
  const StateDict input = lockstep::load_safetensors(config["input"].get<std::string>()).tensors;
  const std::map<std::string, at::Tensor> data(input.begin(), input.end());
  at::manual_seed(config["seed"].get<uint64_t>());
  const auto model = lockstep::make_model(config["model"]);
  auto optimizer = lockstep::make_optimizer("sgd", model->parameters(), {.lr = 0.1});
  std::vector<float> losses;
  for (int64_t step = 0; step < data.at("x").size(0); ++step) {
    const at::Tensor out = model->forward(data.at("x")[step]);
    const at::Tensor rows = out.dim() == 3 ? out.flatten(0, 1) : out;
    const at::Tensor loss = at::cross_entropy_loss(rows, data.at("y")[step].flatten());
    losses.push_back(loss.item<float>());
    lockstep::zero_grad(model->parameters());
    lockstep::backward(loss);
    optimizer->step();
  }
  StateDict output{{"losses", at::tensor(losses)}};
  for (const auto& item : model->named_parameters()) output.emplace_back(item.key(), item.value());
  for (const auto& item : model->named_buffers()) output.emplace_back(item.key(), item.value());
  lockstep::save_safetensors(config["output"].get<std::string>(), output);
}

lockstep::OptimizerOptions optimizer_options(const Json& json) {
  lockstep::OptimizerOptions options;
  options.lr = json.value("lr", options.lr);
  options.momentum = json.value("momentum", options.momentum);
  options.dampening = json.value("dampening", options.dampening);
  options.nesterov = json.value("nesterov", options.nesterov);
  options.beta1 = json.value("beta1", options.beta1);
  options.beta2 = json.value("beta2", options.beta2);
  options.alpha = json.value("alpha", options.alpha);
  options.amsgrad = json.value("amsgrad", options.amsgrad);
  options.centered = json.value("centered", options.centered);
  options.lr_decay = json.value("lr_decay", options.lr_decay);
  if (json.contains("weight_decay")) options.weight_decay = json["weight_decay"].get<double>();
  if (json.contains("eps")) options.eps = json["eps"].get<double>();
  return options;
}

lockstep::StateDict given_state(const StateDict& tensors) {
  lockstep::StateDict state;
  for (const auto& [name, tensor] : tensors) {
    if (name.starts_with("s.")) state.emplace_back(name.substr(2), tensor);
  }
  return state;
}

/// Parameters "p.I", gradients "g.STEP.I" (an absent one: no gradient in that step); writes
/// "p.STEP.I" after every step, and "norm.STEP" where gradients are clipped. With "reload" the
/// optimizer is replaced in the middle by a new one that loads its state. The state at the start is
/// "s.NAME", if any is there; that at the end is written so, with "state".
void run_optimizer(const Json& config) {
  StateDict input = lockstep::load_safetensors(config["input"].get<std::string>()).tensors;
  const std::map<std::string, at::Tensor> by_name(input.begin(), input.end());
  std::vector<at::Tensor> parameters;
  while (by_name.contains("p." + std::to_string(parameters.size()))) {
    parameters.push_back(
        by_name.at("p." + std::to_string(parameters.size())).clone().requires_grad_());
  }
  const auto options = optimizer_options(config["options"]);
  auto optimizer = lockstep::make_optimizer(config["name"], parameters, options);
  if (const auto state = given_state(input); !state.empty()) optimizer->load_state(state);
  const int steps = config["steps"];
  StateDict output;
  for (int step = 0; step < steps; ++step) {
    const std::string suffix = std::to_string(step);
    lockstep::zero_grad(parameters);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto gradient = by_name.find("g." + suffix + "." + std::to_string(i));
      if (gradient != by_name.end()) parameters[i].mutable_grad() = gradient->second.clone();
    }
    if (config.contains("max_norm")) {
      const double norm = lockstep::clip_grad_norm(parameters, config["max_norm"]);
      output.emplace_back("norm." + suffix, at::full({1}, norm, at::kDouble));
    }
    if (config.contains("lrs")) optimizer->set_lr(config["lrs"][step]);
    if (config.value("reload", false) && step == steps / 2) {
      auto fresh = lockstep::make_optimizer(config["name"], parameters, options);
      fresh->load_state(optimizer->state());
      optimizer = std::move(fresh);
    }
    optimizer->step();
    for (size_t i = 0; i < parameters.size(); ++i) {
      output.emplace_back("p." + suffix + "." + std::to_string(i), parameters[i].detach().clone());
    }
  }
  if (config.value("state", false)) {
    for (const auto& [name, tensor] : optimizer->state()) output.emplace_back("s." + name, tensor);
  }
  lockstep::save_safetensors(config["output"].get<std::string>(), output);
}

void run_schedule(const Json& config) {
  lockstep::ScheduleOptions options;
  options.name = config["name"];
  options.warmup_steps = config.value("warmup_steps", 0);
  options.total_steps = config.value("total_steps", 0);
  options.step_size = config.value("step_size", 0);
  options.gamma = config.value("gamma", options.gamma);
  options.min_lr = config.value("min_lr", options.min_lr);
  std::vector<double> rates;
  for (int step = 0; step < config["steps"].get<int>(); ++step) {
    rates.push_back(lockstep::scheduled_lr(options, config["lr"], step));
  }
  lockstep::save_safetensors(config["output"].get<std::string>(),
                             {{"rates", at::tensor(rates, at::kDouble)}});
}

/// Averages the model's weights, which are "u.STEP.NAME" before each update.
/// Writes the averages by the module's names.
void run_average(const Json& config) {
  const auto model = lockstep::make_model(config["model"]);
  lockstep::AveragedModelOptions options;
  options.decay =
      config.contains("decay") ? std::optional(config["decay"].get<double>()) : std::nullopt;
  options.use_buffers = config["use_buffers"];
  lockstep::AveragedModel average(*model, options);
  const StateDict input = lockstep::load_safetensors(config["input"].get<std::string>()).tensors;
  const std::map<std::string, at::Tensor> by_name(input.begin(), input.end());
  const c10::AutoGradMode no_grad(false);
  for (int step = 0; step < config["steps"].get<int>(); ++step) {
    const std::string prefix = "u." + std::to_string(step) + ".";
    for (auto& item : model->named_parameters())
      item.value().copy_(by_name.at(prefix + item.key()));
    for (auto& item : model->named_buffers()) item.value().copy_(by_name.at(prefix + item.key()));
    average.update_parameters();
  }
  lockstep::save_safetensors(config["output"].get<std::string>(), average.state_dict());
}

/// Gradients of a net with dropout whose two halves are checkpointed, and the next random numbers.
void run_checkpointed(const Json& config) {
  const StateDict input = lockstep::load_safetensors(config["input"].get<std::string>()).tensors;
  std::map<std::string, at::Tensor> tensors(input.begin(), input.end());
  for (auto& [name, tensor] : tensors) tensor = tensor.clone().requires_grad_();
  const auto half = [&](const char* name) {
    return [&tensors, name](const at::Tensor& x) {
      return at::dropout(at::tanh(at::linear(x, tensors.at(name))), 0.3, /*train=*/true);
    };
  };
  at::manual_seed(config["seed"].get<uint64_t>());
  const at::Tensor hidden = lockstep::checkpoint(half("w0"), tensors.at("x"));
  const at::Tensor output = lockstep::checkpoint(half("w1"), hidden);
  lockstep::backward((output * output).sum());
  StateDict results{{"output", output.detach()}, {"next", at::randn({4})}};
  for (const auto& [name, tensor] : tensors) results.emplace_back("grad." + name, tensor.grad());
  lockstep::save_safetensors(config["output"].get<std::string>(), results);
}

lockstep::CommHook hook_of(const std::string& name) {
  if (name == "allreduce") return lockstep::CommHook::allreduce;
  if (name == "fp16_compress") return lockstep::CommHook::fp16_compress;
  if (name == "bf16_compress") return lockstep::CommHook::bf16_compress;
  return lockstep::CommHook::none;
}

lockstep::AsyncGradientHook async_hook_of(const Json& config, const lockstep::ProcessGroup& group) {
  if (config.contains("power_sgd")) {
    const Json& options = config["power_sgd"];
    return lockstep::power_sgd_hook(std::make_shared<lockstep::PowerSGDState>(
        lockstep::PowerSGDOptions{.matrix_approximation_rank = options["rank"],
                                  .start_power_sgd_iter = options["start"],
                                  .min_compression_rate = options.value("rate", 2.0),
                                  .use_error_feedback = options.value("feedback", true),
                                  .warm_start = options.value("warm", true),
                                  .orthogonalization_epsilon = options.value("epsilon", 0.0),
                                  .random_seed = options.value("seed", 0U),
                                  .batch_tensors_with_same_shape = options.value("batch", false)}));
  }
  if (config.contains("post_local_sgd")) {
    const Json& options = config["post_local_sgd"];
    return lockstep::post_local_sgd_hook(std::make_shared<lockstep::PostLocalSGDState>(
        group, lockstep::new_subgroups(group, options["subgroup"]), options["start"]));
  }
  return {};
}

/// Null where the parameters are not averaged.
std::unique_ptr<lockstep::ModelAverager> averager_of(const Json& config,
                                                     const lockstep::ProcessGroup& group) {
  if (config.contains("period")) {
    return std::make_unique<lockstep::PeriodicModelAverager>(config["period"], config["warmup"],
                                                             group);
  }
  if (config.contains("hierarchy")) {
    return std::make_unique<lockstep::HierarchicalModelAverager>(
        config["hierarchy"].get<std::vector<std::pair<int64_t, int>>>(), config["warmup"], group);
  }
  return nullptr;
}

/// Trains on this rank's part of "x" [steps, ranks, batch, ...] and "y"; writes the losses, and the
/// module's tensors at the end, to OUTPUT.RANK.
void train(const Json& config, const lockstep::World& world) {
  const StateDict input = lockstep::load_safetensors(config["input"].get<std::string>()).tensors;
  const std::map<std::string, at::Tensor> data(input.begin(), input.end());
  // Only rank 0 has the seed that counts: the others' parameters must come from it.
  at::manual_seed(config["seed"].get<uint64_t>() + static_cast<uint64_t>(world.rank()));
  auto model = lockstep::make_model(config["model"]);
  lockstep::DdpOptions options;
  options.gradient_as_bucket_view = config["view"].get<bool>();
  options.bucket_cap_mb = config.value("bucket_cap_mb", options.bucket_cap_mb);
  options.first_bucket_mb = config.value("bucket_cap_mb", options.first_bucket_mb);
  options.static_graph = config.value("static_graph", false);
  options.find_unused_parameters = config.value("find_unused_parameters", false);
  options.comm_hook = hook_of(config.value("hook", "none"));
  options.async_custom_hook = async_hook_of(config, world.group());
  const auto averager = averager_of(config, world.group());
  lockstep::DistributedDataParallel ddp(model, world.group(), options);
  const auto parameters = model->parameters();
  auto optimizer =
      lockstep::make_optimizer("sgd", parameters, optimizer_options(config["options"]));
  const int accumulate = config.value("accumulate", 1);
  const bool regression = lockstep::model_info(config["model"]).regression;
  std::vector<float> losses;
  const int64_t steps = data.at("x").size(0);
  for (int64_t step = 0; step < steps; ++step) {
    const at::Tensor x = data.at("x")[step][world.rank()], y = data.at("y")[step][world.rank()];
    const auto run = [&] {
      const at::Tensor out = ddp(x);
      const at::Tensor loss = regression ? at::mse_loss(out, y) : at::cross_entropy_loss(out, y);
      losses.push_back(loss.item<float>());
      loss.backward();
    };
    if (step % accumulate == 0) lockstep::zero_grad(parameters);
    if ((step + 1) % accumulate != 0) {
      const auto local = ddp.no_sync();
      run();
      continue;
    }
    run();
    optimizer->step();
    if (averager) averager->average_parameters(parameters);
  }
  StateDict output{{"losses", at::tensor(losses)}};
  for (const auto& item : model->named_parameters()) output.emplace_back(item.key(), item.value());
  for (const auto& item : model->named_buffers()) output.emplace_back(item.key(), item.value());
  lockstep::save_safetensors(
      config["output"].get<std::string>() + "." + std::to_string(world.rank()), output);
}

int run(const Json& config, int rank, int size) {
  at::set_num_threads(config.value("threads", 1));
  const std::string mode = config["mode"];
  if (mode == "init") make_initial_model(config);
  if (mode == "forward") run_model(config);
  if (mode == "steps") run_steps(config);
  if (mode == "optim") run_optimizer(config);
  if (mode == "schedule") run_schedule(config);
  if (mode == "average") run_average(config);
  if (mode == "checkpointed") run_checkpointed(config);
  if (mode == "train") {
    lockstep::InitOptions options;
    options.backend = config.value("backend", "gloo");
    options.init_method = "file://" + config["meet"].get<std::string>();
    options.rank = rank;
    options.world_size = size;
    auto world = lockstep::init(options);
    for (const Json& job : config["runs"]) train(job, world);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 2 && argc != 4) {
      throw lockstep::UsageError("usage: lockstep_parity CONFIG.json [RANK SIZE]");
    }
    return run(Json::parse(std::ifstream(argv[1])), argc == 4 ? std::stoi(argv[2]) : 0,
               argc == 4 ? std::stoi(argv[3]) : 1);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lockstep_parity: %s\n", error.what());
    return lockstep::exit_code_of(error);
  }
}
