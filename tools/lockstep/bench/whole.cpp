// `lockstep bench` loader, launch and train: the loader, and whole programs by the clock.
#include <ATen/ops/ones.h>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/loader.h"
#include "tools/lockstep/bench/bench.h"
#include "tools/lockstep/mnist_folder.h"

namespace lockstep::tool {
namespace {

/// The accuracy in "test accuracy 0.9731 loss 0.0912", `lockstep train`'s last line.
double accuracy_in(const std::string& output) {
  const std::string before = "test accuracy ";
  const size_t place = output.rfind(before);
  if (place == std::string::npos)
    throw Error("lockstep train did not end with 'test accuracy X loss Y' but '" + output + "'");
  return std::stod(output.substr(place + before.size()));
}

/// `lockstep train` as a whole: seconds, peak_bytes, accuracy.
BenchRow run_training(const BenchRunner& runner, const std::string& folder, int64_t batch_size,
                      const std::string& backend) {
  const auto& options = runner.options;
  const int64_t ranks = options.devices.front();
  auto command = split(
      "train --quiet --model mlp --dataset mnist --optimizer sgd --lr 0.01 --momentum 0.9 --seed 0",
      ' ');
  command.insert(command.begin(), own_program());
  command.insert(command.end(),
                 {"--data-dir", folder, "--backend", backend, "--bind-to", options.bind_to,
                  "--max-epochs", std::to_string(options.epochs), "--batch-size",
                  std::to_string(batch_size), "--threads", std::to_string(options.threads)});
  if (backend == "mpi") {
    command = under_mpirun(ranks, command);
  } else {
    command.insert(command.end(), {"--devices", std::to_string(ranks)});
  }
  const auto run = runner.run_whole("lockstep train", command);
  return {
      {"seconds", run.seconds}, {"peak_bytes", run.peak_bytes}, {"accuracy", accuracy_in(run.out)}};
}

}  // namespace

PlainJson loader_worker(const PlainJson& config) {
  DatasetOptions options;
  options.data_dir = config.at("folder").get<std::string>();
  const auto dataset = load_dataset("mnist", options).train;
  LoaderOptions loader_options;
  loader_options.batch_size = config.at("batch_size");
  DataLoader loader(dataset, DistributedSampler({.dataset_size = dataset.size()}),
                    {lockstep::normalize()}, loader_options);
  const auto samples_per_second = [&](int64_t epoch, int64_t batches) {
    const auto start = BenchClock::now();
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

BenchRows bench_loader(BenchRunner& runner) {
  const auto& options = runner.options;
  const BenchData data(options.data_dir);
  const BenchRow config = {{"kind", "loader"},
                           {"ranks", 1},
                           {"folder", data.folder().string()},
                           {"batch_size", options.batch_size_or(64)},
                           {"epochs", 2},
                           {"warmup", kWarmup},
                           {"batches", options.steps}};
  const Sides sides = runner.in_turns("loader", config);
  BenchRow row = {{"dataset", data.name()}};
  row.update(pick(config, {"batch_size"}));
  add_comparison(row, "samples_per_s", sides, options.backends.front(), "/samples_per_s");
  return {row};
}

PlainJson launch_worker(const PlainJson& config) {
  const World world = init({.backend = config.at("backend")});
  auto one = at::ones({1}, world.device());
  world.group().all_reduce(one);
  if (one.item<double>() != world.size()) {
    throw CommError("an all-reduce of ones over " + std::to_string(world.size()) + " ranks gave " +
                    std::to_string(one.item<double>()));
  }
  return {};
}

BenchRows bench_launch(BenchRunner& runner) {
  BenchRows rows;
  for (const int64_t ranks : runner.options.devices) {
    const auto measure = [&](const std::string& side) -> BenchRow {
      if (side == kPythonSide) return runner.torchrun_seconds(ranks);
      const auto worker = worker_command({{"kind", "launch"}, {"backend", side}});
      if (side == "mpi") return runner.run_whole("mpirun", under_mpirun(ranks, worker)).seconds;
      return runner.run_whole("lockstep run", under_run(ranks, worker)).seconds;
    };
    const Sides sides =
        runner.in_turns("launch, " + counted(ranks, "rank"), runner.sides(), measure);
    for (const auto& backend : runner.options.backends) {
      rows.push_back({{"ranks", ranks}, {"backend", backend}});
      add_comparison(rows.back(), "seconds", sides, backend, "");
    }
  }
  return rows;
}

BenchRows bench_train(BenchRunner& runner) {
  const auto& options = runner.options;
  const BenchData data(options.data_dir);
  const std::string backend = options.backends.front(), folder = data.folder().string();
  const int64_t batch_size = options.batch_size_or(64), ranks = options.devices.front();
  std::vector<std::string> side_names = {backend};
  if (runner.has_python()) side_names.push_back(kPythonSide);
  const BenchRow config = {
      {"folder", folder}, {"ranks", ranks}, {"epochs", options.epochs}, {"batch_size", batch_size}};
  const Sides sides =
      runner.in_turns("train", side_names, [&](const std::string& side) -> BenchRow {
        if (side != kPythonSide) return run_training(runner, folder, batch_size, backend);
        const auto [run, result] = runner.run_python("Python's training", "train.py", config);
        return {{"seconds", run.seconds},
                {"peak_bytes", run.peak_bytes},
                {"accuracy", result.at("accuracy")}};
      });
  BenchRow row = {{"model", "mlp"},
                  {"dataset", data.name()},
                  {"ranks", ranks},
                  {"backend", backend},
                  {"epochs", options.epochs}};
  add_comparison(row, "seconds", sides, backend, "/seconds");
  add_comparison(row, "peak_bytes", sides, backend, "/peak_bytes", "memory_ratio");
  add_comparison(row, "accuracy", sides, backend, "/accuracy", "accuracy_ratio");
  if (runner.has_python())
    row["accuracy_points_away"] =
        100 * std::abs(row["accuracy"].get<double>() - row["python_accuracy"].get<double>());
  return {row};
}

}  // namespace lockstep::tool
