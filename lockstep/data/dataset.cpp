#include "lockstep/data/dataset.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/words.h"
#include "lockstep/data/digits.h"
#include "lockstep/data/mnist.h"
#include "lockstep/data/tensor_files.h"

namespace lockstep {
namespace {

constexpr int64_t kDigitClasses = 10;
constexpr int64_t kRandomFeatures = 20;

void expect_size(const std::string& option, int64_t size) {
  if (size < 1) {
    throw UsageError(option + " is " + std::to_string(size) + "; expected at least 1 sample");
  }
}

/// Samples [first, first + count) of the digits of `seed`.
TensorDataset make_digits(uint64_t seed, int64_t first, int64_t count) {
  TensorDataset part{.name = "digits",
                     .data = at::empty({count, kDigitSide, kDigitSide}, at::kByte),
                     .targets = at::empty({count}, at::kLong),
                     .num_classes = kDigitClasses};
  auto* pixels = part.data.mutable_data_ptr<uint8_t>();
  auto* labels = part.targets.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i, pixels += kDigitSide * kDigitSide) {
    labels[i] = render_digit(seed, static_cast<uint64_t>(first + i), pixels);
  }
  return part;
}

DatasetSplits load_digits(const DatasetOptions& options) {
  expect_size("digits_train", options.digits_train);
  expect_size("digits_test", options.digits_test);
  return {make_digits(options.data_seed, 0, options.digits_train),
          make_digits(options.data_seed, options.digits_train, options.digits_test)};
}

/// The next `count` pairs of the stream, drawn pair by pair as Python's list comprehension does.
TensorDataset make_regression(at::Generator& generator, int64_t count) {
  TensorDataset part{.name = "random",
                     .data = at::empty({count, kRandomFeatures}),
                     .targets = at::empty({count, 1}),
                     .num_classes = 0};
  for (int64_t i = 0; i < count; ++i) {
    part.data[i].copy_(at::rand({kRandomFeatures}, generator));
    part.targets[i].copy_(at::rand({1}, generator));
  }
  return part;
}

DatasetSplits load_random(const DatasetOptions& options) {
  expect_size("random_train", options.random_train);
  expect_size("random_test", options.random_test);
  at::Generator generator = at::detail::createCPUGenerator(options.data_seed);
  TensorDataset train = make_regression(generator, options.random_train);
  return {std::move(train), make_regression(generator, options.random_test)};
}

DatasetOptions with_data_dir(DatasetOptions options) {
  if (options.data_dir.empty()) {
    options.data_dir = env_string("LOCKSTEP_DATA_DIR").value_or("data");
  }
  return options;
}

}  // namespace

DatasetSplits load_dataset(const std::string& name, const DatasetOptions& options) {
  const DatasetOptions resolved = with_data_dir(options);
  if (const MnistLike* source = mnist_like(name)) return load_mnist(*source, resolved);
  if (name == "digits") return load_digits(resolved);
  if (name == "random") return load_random(resolved);
  constexpr std::string_view kFile = "file:";
  if (name == kFile) {
    throw UsageError("data set 'file:' names no file",
                     "file:PATH takes a .safetensors or .npz file or a folder of .npy files");
  }
  if (name.starts_with(kFile)) {
    return load_tensor_dataset(name.substr(kFile.size()), resolved.test_fraction);
  }
  throw UsageError(unknown_word("data set", name, dataset_names()));
}

std::optional<std::filesystem::path> dataset_folder(const std::string& name,
                                                    const DatasetOptions& options) {
  const MnistLike* source = mnist_like(name);
  if (!source) throw UsageError("data set '" + name + "' has no folder of files");
  return mnist_folder(*source, with_data_dir(options).data_dir);
}

std::vector<std::string> dataset_names() {
  return {"mnist", "fashion-mnist", "digits", "random"};
}

}  // namespace lockstep
