#include "tools/lockstep/bench/loader_bench.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randint.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep {

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double loader_samples_per_second(const TensorDataset& dataset, const Compose& transforms,
                                 const LoaderBenchOptions& options) {
  if (options.epochs < 1)
    throw UsageError("the loader's benchmark got " + std::to_string(options.epochs) +
                     " epochs, expected at least 1");
  DataLoader loader(dataset, DistributedSampler({.dataset_size = dataset.size()}), transforms,
                    options.loader);
  std::vector<double> rates;
  for (int64_t epoch = 0; epoch <= options.epochs; ++epoch) {
    const double start = options.seconds();
    int64_t samples = 0;
    for (const Batch& batch : loader.epoch(epoch)) samples += batch.size();
    const double taken = options.seconds() - start;
    if (epoch > 0) rates.push_back(static_cast<double>(samples) / taken);
  }
  const auto middle = rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2);
  std::nth_element(rates.begin(), middle, rates.end());
  return *middle;
}

TensorDataset random_images(int64_t count) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(0);
  TensorDataset dataset;
  dataset.name = "random images";
  dataset.data = at::randint(256, {count, 28, 28}, generator, at::kByte);
  dataset.targets = at::randint(10, {count}, generator, at::kLong);
  dataset.num_classes = 10;
  return dataset;
}

}  // namespace lockstep
