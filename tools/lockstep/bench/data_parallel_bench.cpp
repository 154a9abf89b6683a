// `lockstep bench data-parallel`: when replicas in one process pay, and why.
#include <ATen/Parallel.h>
#include <ATen/ops/rand.h>
#include <c10/core/GradMode.h>
#include <torch/nn/cloneable.h>

#include <algorithm>
#include <map>

#include "lockstep/autograd/backward.h"
#include "lockstep/base/cores.h"
#include "lockstep/models/models.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/data_parallel/data_parallel.h"
#include "tools/lockstep/bench/step_bench.h"

namespace lockstep::tool {
namespace {

/// Does nothing: what replicas cost besides their work.
struct Nothing : torch::nn::Cloneable<Nothing> {
  void reset() override {}
  at::Tensor forward(const at::Tensor& x) { return x; }
};

/// Medians of a model's forward, and backward, in several ways, in turns block by block: what
/// disturbs the machine for a while disturbs all.
class DataParallelBench {
 public:
  explicit DataParallelBench(const PlainJson& config)
      : info_(model_info(config.at("model"))),
        training_(config.at("training")),
        steps_(config.at("steps")),
        model_(seeded_model(info_.name)) {
    options_.devices.assign(config.at("replicas").get<size_t>(), c10::kCPU);
    options_.threads_per_replica = config.at("threads");
    if (!training_) model_->eval();
  }

  PlainJson measure(int64_t batch_size) {
    DataParallel<std::shared_ptr<Model>> parallel(model_, options_);
    DataParallel<std::shared_ptr<Nothing>> nothing(std::make_shared<Nothing>(), options_);
    const int threads = options_.threads_per_replica;
    const auto replicas = static_cast<int>(options_.devices.size());
    const at::Tensor batch = at::rand(SampleSpec{info_.input_shape}.batch_shape(batch_size));
    const at::Tensor part = batch.chunk(replicas).front();
    std::map<std::string, Figures> times;
    const int64_t blocks = std::min<int64_t>(5, steps_);
    for (int64_t block = 0; block < blocks; ++block) {
      const auto add = [&](const char* name, int of_threads, auto& module, const at::Tensor& x) {
        at::set_num_threads(of_threads);
        const int64_t steps = steps_ / blocks + (block < steps_ % blocks ? 1 : 0);
        for (const double time : timed([&] { run(module, x); }, 1, steps))
          times[name].push_back(time);
      };
      add("single_us", threads, *model_, batch);
      add("us", threads, parallel, batch);
      add("replica_us", threads, *model_, part);
      add("start_us", threads, nothing, batch);
      add("single_all_threads_us", threads * replicas, *model_, batch);
    }
    PlainJson result;
    for (auto& [name, values] : times) result[name] = median(std::move(values));
    result["ratio"] = result["us"].get<double>() / result["single_us"].get<double>();
    return result;
  }

 private:
  template <class Module>
  void run(Module& module, const at::Tensor& batch) {
    const c10::AutoGradMode gradients(training_);
    const at::Tensor output = module.forward(batch);
    if (!output.requires_grad()) return;
    backward(output.sum());
    zero_grad(model_->parameters());
  }

  const ModelInfo info_;
  bool training_;
  int64_t steps_;
  std::shared_ptr<Model> model_;
  DataParallelOptions options_;
};

std::string microseconds(double us) {
  if (us >= 10'000) return formatted("%.0f ms", us / 1000);
  return formatted(us < 10 ? "%.1f us" : "%.0f us", us);
}

/// Why replicas are faster or slower than the model by itself, from what was measured.
std::string reason(const BenchRow& row, int64_t replicas) {
  const double one = row["single_us"], several = row["us"], start = row["start_us"],
               part = row["replica_us"];
  const double saved = one - part;
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
  return parts + " by itself but " + microseconds(several - start) + " beside " +
         std::to_string(replicas - 1) + " more: they share cores or memory";
}

}  // namespace

PlainJson data_parallel_worker(const PlainJson& config) {
  DataParallelBench bench(config);
  PlainJson rows = nlohmann::json::array();
  for (const auto& size : config.at("batch_sizes")) {
    rows.push_back(bench.measure(size));
  }
  return {{"rows", rows}};
}

BenchRows bench_data_parallel(BenchRunner& runner) {
  const auto& options = runner.options;
  const int64_t replicas = options.replicas > 0 ? options.replicas : usable_cores();
  BenchRows rows;
  for (const auto& model : options.models) {
    const BenchRow config = {{"kind", "data-parallel"},
                             {"ranks", 1},
                             {"model", model},
                             {"batch_sizes", options.batch_sizes},
                             {"replicas", replicas},
                             {"threads", options.threads},
                             {"training", options.training},
                             {"steps", options.steps}};
    const Rounds rounds = runner.in_turns("data-parallel " + model, config).begin()->second;
    for (size_t i = 0; i < options.batch_sizes.size(); ++i) {
      BenchRow row = {{"model", model},
                      {"batch_size", options.batch_sizes[i]},
                      {"replicas", replicas},
                      {"threads", options.threads}};
      for (const std::string key :
           {"single_us", "single_all_threads_us", "replica_us", "start_us", "us", "ratio"}) {
        row[key] = median_at(rounds, "/rows/" + std::to_string(i) + "/" + key);
      }
      row["faster"] = options.batch_sizes[i] > 1 && row["ratio"].get<double>() < 1 ? "yes" : "no";
      row["why"] = reason(row, replicas);
      rows.push_back(row);
    }
  }
  return rows;
}

}  // namespace lockstep::tool
