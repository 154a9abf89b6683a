// `lockstep bench data-parallel`: when replicas in one process pay, and why.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/rand.h>
#include <c10/core/GradMode.h>
#include <torch/nn/cloneable.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>

#include "lockstep/autograd/backward.h"
#include "lockstep/base/cores.h"
#include "lockstep/base/file.h"
#include "lockstep/base/words.h"
#include "lockstep/models/models.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/data_parallel/data_parallel.h"
#include "tools/lockstep/bench/worker.h"
#include "tools/lockstep/process.h"

namespace lockstep::tool {
namespace {

using Json = nlohmann::ordered_json;

/// Does nothing: what replicas cost besides their work.
struct Nothing : torch::nn::Cloneable<Nothing> {
  void reset() override {}
  at::Tensor forward(const at::Tensor& x) { return x; }
};

class DataParallelBench {
 public:
  explicit DataParallelBench(const nlohmann::json& config)
      : info_(model_info(config.at("model"))),
        training_(config.at("training")),
        threads_(config.at("threads")),
        replicas_(config.at("replicas")),
        steps_(config.at("steps")),
        warmup_(config.at("warmup")),
        model_(seeded_model(info_.name)),
        parallel_(model_, options()),
        nothing_(std::make_shared<Nothing>(), options()) {
    if (!training_) model_->eval();
  }

  nlohmann::json measure(int64_t batch_size) {
    std::vector<int64_t> shape = info_.input_shape;
    shape.insert(shape.begin(), batch_size);
    const at::Tensor batch = at::rand(shape);
    const at::Tensor part = batch.chunk(replicas_).front();
    std::map<std::string, std::vector<double>> times;
    const int64_t blocks = std::min<int64_t>(5, steps_);
    // In turns, block by block: what disturbs the machine for a while disturbs all.
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t steps = steps_ / blocks + (block < steps_ % blocks ? 1 : 0);
      time_block(
          threads_, [&] { alone(batch); }, steps, times["single_us"]);
      time_block(
          threads_, [&] { several(batch); }, steps, times["us"]);
      time_block(
          threads_, [&] { alone(part); }, steps, times["replica_us"]);
      time_block(
          threads_, [&] { idle(batch); }, steps, times["start_us"]);
      time_block(
          threads_ * static_cast<int>(replicas_), [&] { alone(batch); }, steps,
          times["single_all_threads_us"]);
    }
    nlohmann::json result;
    for (auto& [name, values] : times) result[name] = median(std::move(values));
    return result;
  }

 private:
  static std::shared_ptr<Model> seeded_model(const std::string& name) {
    at::manual_seed(0);
    return make_model(name);
  }

  DataParallelOptions options() const {
    DataParallelOptions options;
    options.devices.assign(static_cast<size_t>(replicas_), c10::kCPU);
    options.threads_per_replica = threads_;
    return options;
  }

  template <class Run>
  void time_block(int threads, Run run, int64_t steps, std::vector<double>& times) {
    at::set_num_threads(threads);
    for (int64_t i = 0; i < warmup_; ++i) run();
    time_calls(run, steps, times);
  }

  void finish(const at::Tensor& output) {
    if (!training_) return;
    backward(output.sum());
    zero_grad(model_->parameters());
  }
  void alone(const at::Tensor& batch) {
    const c10::AutoGradMode gradients(training_);
    finish(model_->forward(batch));
  }
  void several(const at::Tensor& batch) {
    const c10::AutoGradMode gradients(training_);
    finish(parallel_.forward(batch));
  }
  void idle(const at::Tensor& batch) {
    const at::NoGradGuard no_grad;
    nothing_.forward(batch);
  }

  const ModelInfo info_;
  bool training_;
  int threads_;
  int64_t replicas_;
  int64_t steps_;
  int64_t warmup_;
  std::shared_ptr<Model> model_;
  DataParallel<std::shared_ptr<Model>> parallel_;
  DataParallel<std::shared_ptr<Nothing>> nothing_;
};

std::string microseconds(double us) {
  char text[32];
  std::snprintf(text, sizeof text,
                us < 10       ? "%.1f us"
                : us < 10'000 ? "%.0f us"
                              : "%.0f ms",
                us < 10'000 ? us : us / 1000);
  return text;
}

/// Why replicas are faster or slower than the model by itself, from what was measured.
std::string reason(const Json& row, int64_t replicas) {
  const double one = row["single_us"], several = row["us"], start = row["start_us"],
               part = row["replica_us"];
  const double saved = one - part, crowded = several - start - part;
  const std::string parts = "a part takes " + microseconds(part);
  if (row["batch_size"].get<int64_t>() < 2) {
    return "one sample cannot be cut: one replica has all the work";
  }
  if (several < one) {
    return parts + " in place of " + microseconds(one) + "; cutting, waking and gathering " +
           microseconds(start);
  }
  if (start > saved) {
    return "cutting, waking and gathering takes " + microseconds(start) + ", more than the " +
           microseconds(std::max(0.0, saved)) + " that smaller parts save";
  }
  return parts + " by itself but " + microseconds(part + crowded) + " beside " +
         std::to_string(replicas - 1) + " more: they share cores or memory";
}

/// The worker's result, measured in a fresh process.
Json run_round(Json config, const BenchOptions& options, const std::filesystem::path& file) {
  config["result"] = file.string();
  const auto program = std::filesystem::read_symlink("/proc/self/exe").string();
  const auto result =
      run_process({{program, "bench", "worker", config.dump()},
                   {{"OMP_NUM_THREADS", std::to_string(options.threads)}, {"RANK", ""}}},
                  std::chrono::minutes(10));
  expect_success("data-parallel benchmark", result);
  return Json::parse(read_file(file));
}

/// Medians over the rounds for the batch size of that index.
BenchRow row_of(const Json& config, int64_t batch_size, const std::vector<Json>& rounds,
                size_t index) {
  std::vector<double> ratios;
  std::map<std::string, std::vector<double>> figures;
  for (const Json& round : rounds) {
    const Json& result = round["sizes"][index];
    for (const auto& [name, value] : result.items()) figures[name].push_back(value);
    ratios.push_back(result["us"].get<double>() / result["single_us"].get<double>());
  }
  BenchRow row = {{"model", config["model"]},
                  {"batch_size", batch_size},
                  {"replicas", config["replicas"]},
                  {"threads", config["threads"]}};
  for (const char* name : {"single_us", "single_all_threads_us", "replica_us", "start_us", "us"}) {
    row[name] = median(figures[name]);
  }
  row["ratio"] = median(ratios);
  row["faster"] = batch_size > 1 && row["ratio"].get<double>() < 1 ? "yes" : "no";
  row["why"] = reason(row, config["replicas"]);
  return row;
}

}  // namespace

nlohmann::json bench_data_parallel_worker(const nlohmann::json& config) {
  DataParallelBench bench(config);
  nlohmann::json sizes = nlohmann::json::array();
  for (const auto& size : config.at("batch_sizes")) sizes.push_back(bench.measure(size));
  return {{"sizes", sizes}};
}

BenchRows bench_data_parallel(const BenchOptions& options) {
  const TemporaryDirectory folder("lockstep-bench");
  const int64_t replicas = options.replicas > 0 ? options.replicas : usable_cores();
  BenchRows rows;
  for (const auto& model : options.models) {
    Json config = {{"kind", "data-parallel"},
                   {"model", model},
                   {"batch_sizes", options.batch_sizes},
                   {"replicas", replicas},
                   {"threads", options.threads},
                   {"training", options.training},
                   {"warmup", 1},
                   {"steps", options.steps}};
    std::vector<Json> rounds;
    for (int round = 0; round < options.rounds_or_default(); ++round) {
      bench_progress("data-parallel " + model + ": round " + std::to_string(round + 1) + " of " +
                     std::to_string(options.rounds_or_default()));
      rounds.push_back(run_round(config, options, folder.path() / std::to_string(round)));
    }
    for (size_t i = 0; i < options.batch_sizes.size(); ++i) {
      rows.push_back(row_of(config, options.batch_sizes[i], rounds, i));
    }
  }
  return rows;
}

}  // namespace lockstep::tool
