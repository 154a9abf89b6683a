// Does in C++ what zero_parity_worker.py does in Python, on tensors that the script wrote:
// lockstep_zero_parity CONFIG.json RANK SIZE
#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"
#include "lockstep/comm/world.h"
#include "lockstep/data/safetensors.h"
#include "lockstep/models/models.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/join.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"

namespace {

using Json = nlohmann::json;
using lockstep::StateDict;

/// "x" and "y" of [steps, ranks, batch, ...].
struct Job {
  Job(const Json& config, const lockstep::World& world) : config(config), world(world) {
    for (const auto& [name, tensor] :
         lockstep::load_safetensors(config["input"].get<std::string>()).tensors)
      (name == "x" ? x : y) = tensor.select(1, world.rank());
    // Only rank 0 has the seed that counts: the others' parameters must come from it.
    at::manual_seed(config["seed"].get<uint64_t>() + static_cast<uint64_t>(world.rank()));
    model = lockstep::make_model(config["model"]);
  }

  at::Tensor loss(const at::Tensor& output, int64_t step) {
    const at::Tensor value = at::cross_entropy_loss(output, y[step]);
    losses.push_back(value.item<float>());
    return value;
  }

  lockstep::OptimizerFactory factory() const {
    return [this](std::vector<at::Tensor> parameters) {
      lockstep::OptimizerOptions options;
      options.lr = config["lr"];
      options.momentum = config.value("momentum", 0.0);
      options.weight_decay = config.value("weight_decay", 0.0);
      return lockstep::make_optimizer(config["optimizer"], std::move(parameters), options);
    };
  }

  void write(const lockstep::StateDict& state) const {
    StateDict output{{"losses", at::tensor(losses)}};
    for (const auto& item : model->named_parameters())
      output.emplace_back(item.key(), item.value());
    for (const auto& item : model->named_buffers()) output.emplace_back(item.key(), item.value());
    for (const auto& [name, tensor] : state) output.emplace_back("s." + name, tensor);
    lockstep::save_safetensors(
        config["output"].get<std::string>() + "." + std::to_string(world.rank()), output);
  }

  const Json& config;
  const lockstep::World& world;
  at::Tensor x, y;
  std::shared_ptr<lockstep::Model> model;
  std::vector<float> losses;
};

void train_by_strategy(Job& job) {
  lockstep::StrategySetup setup;
  setup.module = job.model;
  setup.make_optimizer = job.factory();
  setup.group = job.world.group();
  const auto strategy = job.config["way"] == "zero1" ? lockstep::make_zero1_strategy(setup)
                                                     : lockstep::make_zero2_strategy(setup);
  const int64_t accumulate = job.config.value("accumulate", 1);
  for (int64_t step = 0; step < job.x.size(0); ++step) {
    lockstep::BatchWork work;
    work.loss = [&] { return job.loss(job.model->forward(job.x[step]), step); };
    work.last_of_step = (step + 1) % accumulate == 0;
    strategy->run_batch(work);
    if (!work.last_of_step) continue;
    if (job.config.contains("max_norm")) strategy->clip_grad_norm(job.config["max_norm"]);
    strategy->step();
    strategy->zero_grad();
  }
  job.write(strategy->optimizer_state());
}

/// "optimizer": a user's loop of DistributedDataParallel and ZeroRedundancyOptimizer. "overlap":
/// the step is a hook of the first. "join": with plain inputs of uneven number.
void train_by_loop(Job& job) {
  const std::string way = job.config["way"];
  lockstep::ZeroRedundancyOptimizer zero(job.model->parameters(), job.factory(), job.world.group());
  lockstep::DdpOptions ddp_options;
  if (way == "overlap") ddp_options.async_custom_hook = zero.hook_with_zero_step();
  lockstep::DistributedDataParallel ddp(job.model, job.world.group(), ddp_options);
  const auto loop = [&](int64_t steps) {
    for (int64_t step = 0; step < steps; ++step) {
      zero.zero_grad();
      job.loss(ddp(job.x[step]), step).backward();
      if (job.config.contains("max_norm"))
        lockstep::clip_grad_norm(job.model->parameters(), job.config["max_norm"]);
      zero.step();
    }
  };
  if (way == "join") {
    lockstep::JoinOptions join_options;
    join_options.divide_by_initial_world_size = job.config["divide_by_all"];
    lockstep::Join join({ddp, zero}, join_options);
    join.run([&] { loop(job.config["inputs"].at(static_cast<size_t>(job.world.rank()))); });
  } else {
    loop(job.x.size(0));
  }
  zero.consolidate_state_dict(0);
  lockstep::StateDict state;
  if (job.world.rank() == 0) state = zero.state();
  job.write(state);
}

void run(const Json& config, int rank, int size) {
  at::set_num_threads(1);
  lockstep::InitOptions options;
  options.backend = config["backend"];
  options.init_method = "file://" + config["meet"].get<std::string>();
  options.rank = rank;
  options.world_size = size;
  auto world = lockstep::init(options);
  for (const Json& one : config["runs"]) {
    Job job(one, world);
    const std::string way = one["way"];
    way.starts_with("zero") ? train_by_strategy(job) : train_by_loop(job);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 4) throw lockstep::UsageError("usage: lockstep_zero_parity CONFIG.json RANK SIZE");
    run(Json::parse(std::ifstream(argv[1])), std::stoi(argv[2]), std::stoi(argv[3]));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lockstep_zero_parity: %s\n", error.what());
    return lockstep::exit_code_of(error);
  }
}
