// A rank of a pipeline for the comparisons with Python, for measurements, and for a death in the
// middle: see test_pipeline.py.
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "lockstep/autograd/linear.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/world.h"
#include "lockstep/data/safetensors.h"
#include "lockstep/models/models.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/pipeline/pipeline_strategy.h"
#include "lockstep/parallel/pipeline/schedule.h"
#include "lockstep/parallel/state_dict.h"

namespace {

using Json = nlohmann::json;
using namespace lockstep;

/// Linear layers with ReLU between, named "0", "1", ... as in the Python twin.
struct Perceptron : torch::nn::Module {
  explicit Perceptron(const std::vector<int64_t>& widths) {
    for (size_t i = 0; i + 1 < widths.size(); ++i) {
      linears.push_back(
          register_module(std::to_string(i), torch::nn::Linear(widths[i], widths[i + 1])));
    }
  }
  std::vector<Layer> layers() {
    std::vector<Layer> all;
    for (size_t i = 0; i < linears.size(); ++i) {
      auto layer = linears[i];
      const bool last = i + 1 == linears.size();
      all.push_back({std::to_string(i), layer.ptr(), [layer, last](const at::Tensor& x) {
                       const at::Tensor y = linear(x, layer->weight, layer->bias);
                       return last ? y : at::relu(y);
                     }});
    }
    return all;
  }
  std::vector<torch::nn::Linear> linears;
};

/// The built-in model of that name, else linear layers.
std::pair<std::shared_ptr<torch::nn::Module>, std::vector<Layer>> make(const Json& config) {
  if (!config.contains("model")) {
    auto model = std::make_shared<Perceptron>(config["widths"].get<std::vector<int64_t>>());
    return {model, model->layers()};
  }
  auto model = make_model(config["model"]);
  std::vector<Layer> layers;
  for (const ModelLayer& layer : model->layers()) {
    layers.push_back({layer.name, layer.module, layer.forward});
  }
  return {model, layers};
}

class Job {
 public:
  Job(const Json& config, const World& world) : config_(config), world_(world) {
    StrategySetup setup;
    std::tie(setup.module, setup.layers) = make(config);
    model_ = setup.module;
    const auto tensors = load_safetensors(config["input"].get<std::string>()).tensors;
    for (const auto& [name, tensor] : tensors) given_[name] = tensor;
    const at::NoGradGuard no_grad;
    for (const auto& item : model_->named_parameters()) {
      if (given_.contains(item.key())) item.value().copy_(given_.at(item.key()));
    }
    setup.group = world.group();
    setup.make_optimizer = [&](std::vector<at::Tensor> parameters) {
      return make_optimizer(config["optimizer"], std::move(parameters), {.lr = config["lr"]});
    };
    setup.options.pipeline =
        PipelineOptions{.num_micro_batches = config["micro_batches"],
                        .schedule = config["schedule"],
                        .plan = config.value("plan", std::vector<std::string>())};
    setup.options.mesh = config.value("mesh", "");
    strategy_ = make_pipeline_strategy(setup);
  }

  void train() {
    const at::Tensor x = given_.at("x"), y = given_.at("y");
    for (int64_t i = 0; i < x.size(0); ++i) {
      const DataShare share = strategy_->data_share();
      step(x[i].chunk(share.size).at(static_cast<size_t>(share.rank)),
           y[i].chunk(share.size).at(static_cast<size_t>(share.rank)));
      if (i == config_.value("dies_after", int64_t{-1}) && world_.rank() == world_.size() - 1) {
        std::raise(SIGKILL);
      }
    }
    auto state = strategy_->model_state();
    if (world_.rank() == world_.size() - 1) {
      save_safetensors(config_["output"].get<std::string>() + ".losses",
                       {{"losses", at::tensor(losses_, at::kFloat)}});
    }
    if (world_.rank() == 0) save_safetensors(config_["output"].get<std::string>(), state);
  }

  void measure() {
    const at::Tensor x = given_.at("x")[0], y = given_.at("y")[0];
    std::vector<double> times;
    for (int i = 0; i < config_["steps"].get<int>() + 20; ++i) {
      const auto start = std::chrono::steady_clock::now();
      step(x, y);
      const auto end = std::chrono::steady_clock::now();
      if (i >= 20) times.push_back(std::chrono::duration<double, std::micro>(end - start).count());
    }
    const auto at = static_cast<std::ptrdiff_t>(static_cast<double>(times.size()) *
                                                config_.value("quantile", 0.5));
    std::nth_element(times.begin(), times.begin() + at, times.end());
    if (world_.rank() == 0) std::printf("%.1f\n", times[static_cast<size_t>(at)]);
  }

 private:
  void step(const at::Tensor& x, const at::Tensor& y) {
    strategy_->zero_grad();
    BatchWork work;
    work.input = x;
    work.target = y;
    work.criterion = [&](const at::Tensor& output, const at::Tensor& target) {
      // Rows of logits; of a text one for each character.
      const at::Tensor loss = torch::nn::functional::cross_entropy(
          output.reshape({-1, output.size(-1)}), target.reshape(-1));
      losses_.push_back(loss.item<float>());
      return loss;
    };
    strategy_->run_batch(work);
    strategy_->step();
  }

  Json config_;
  const World& world_;
  std::shared_ptr<torch::nn::Module> model_;
  std::map<std::string, at::Tensor> given_;
  std::unique_ptr<Strategy> strategy_;
  std::vector<float> losses_;
};

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 4) throw UsageError("usage: lockstep_pipeline_rank CONFIG.json RANK SIZE");
    const Json config = Json::parse(std::ifstream(argv[1]));
    at::set_num_threads(1);
    const World world = init({.backend = config["backend"],
                              .init_method = "file://" + config["meet"].get<std::string>(),
                              .rank = std::stoi(argv[2]),
                              .world_size = std::stoi(argv[3])});
    for (const Json& run : config["runs"]) {
      Job job(run, world);
      run.contains("steps") ? job.measure() : job.train();
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lockstep_pipeline_rank: %s\n", error.what());
    return exit_code_of(error);
  }
}
