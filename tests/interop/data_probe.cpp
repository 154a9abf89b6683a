// What the data room gives for options that data_test.py asks about.
//   data_probe sampler < QUESTIONS
//     A question is a line of JSON: the sampler's options and "epoch". An answer is a line of JSON:
//     "indices", "padding", "total_size".
//   data_probe loader IN.safetensors OUT.safetensors OPTIONS
//     IN holds data and targets. OPTIONS is JSON: the sampler's and the loader's options, "epochs",
//     "first_batch", "mean", "std", "flatten". OUT gets tensors "EPOCH.BATCH.data", ".target" and
//     ".padding".
#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>

#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/safetensors.h"

namespace lockstep {
namespace {

using nlohmann::json;

SamplerOptions sampler_options(const json& asked, int64_t dataset_size) {
  return {.dataset_size = dataset_size,
          .rank = asked.at("rank"),
          .world_size = asked.at("world_size"),
          .shuffle = asked.at("shuffle"),
          .seed = asked.at("seed"),
          .drop_last = asked.at("drop_last")};
}

void answer_sampler_questions() {
  std::string line;
  while (std::getline(std::cin, line)) {
    const json asked = json::parse(line);
    const DistributedSampler sampler(sampler_options(asked, asked.at("dataset_size")));
    const json answer = {{"indices", sampler.indices(asked.at("epoch").get<int64_t>())},
                         {"padding", sampler.padding()},
                         {"total_size", sampler.total_size()}};
    std::cout << answer.dump() << '\n';
  }
}

TensorDataset read_dataset(const std::string& path) {
  TensorDataset dataset;
  dataset.name = path;
  for (const auto& [name, tensor] : load_safetensors(path).tensors)
    (name == "data" ? dataset.data : dataset.targets) = tensor;
  return dataset;
}

Compose transforms_of(const json& asked) {
  std::vector<TransformPtr> steps;
  if (asked.contains("mean")) steps.push_back(normalize(asked.at("mean"), asked.at("std")));
  if (asked.value("flatten", false)) steps.push_back(flatten());
  return Compose(steps);
}

void write_batches(const std::string& in, const std::string& out, const json& asked) {
  const TensorDataset dataset = read_dataset(in);
  DataLoader loader(dataset, DistributedSampler(sampler_options(asked, dataset.size())),
                    transforms_of(asked),
                    {.batch_size = asked.at("batch_size"),
                     .drop_last = asked.at("batch_drop_last"),
                     .num_workers = asked.at("num_workers")});
  StateDict batches;
  for (int64_t epoch : asked.at("epochs").get<std::vector<int64_t>>()) {
    for (const Batch& batch : loader.epoch(epoch, asked.value("first_batch", 0))) {
      const std::string name = std::to_string(epoch) + "." + std::to_string(batch.index);
      batches.emplace_back(name + ".data", batch.data);
      batches.emplace_back(name + ".target", batch.target);
      batches.emplace_back(name + ".padding", at::scalar_tensor(batch.padding, at::kLong));
    }
  }
  save_safetensors(out, batches);
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  try {
    if (args.size() == 1 && args[0] == "sampler")
      lockstep::answer_sampler_questions();
    else if (args.size() == 4 && args[0] == "loader")
      lockstep::write_batches(args[1], args[2], nlohmann::json::parse(args[3]));
    else
      throw lockstep::UsageError("usage: data_probe sampler | loader IN OUT OPTIONS");
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return lockstep::exit_code_of(error);
  }
  return 0;
}
