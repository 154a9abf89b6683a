#include "lockstep/data/dataset.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>

#include <algorithm>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/data/digits.h"
#include "lockstep/data/download.h"
#include "lockstep/data/image_folder.h"
#include "lockstep/data/named_sets.h"

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
  options.data_dir = data_dir_or_default(options.data_dir);
  return options;
}

/// A kind of data set that is named with the path of its files.
struct PathSet {
  const char* name;
  const char* what;  ///< For the complaint about a path that is missing.
  DatasetSplits (*load)(const std::filesystem::path& path, const DatasetOptions& options);
};

const std::vector<PathSet>& path_sets() {
  static const std::vector<PathSet> sets{
      {"file", "a .safetensors or .npz file or a folder of .npy files", load_tensor_dataset},
      {"text", "a text file", load_text},
      {"folder", "a folder with a folder of images for each class",
       [](const std::filesystem::path& path, const DatasetOptions& options) {
         const DatasetSources sources = open_image_folder(path, options);
         return DatasetSplits{read_all(*sources.train), read_all(*sources.test)};
       }},
  };
  return sets;
}

/// Of "KIND:PATH"; null for another name.
const PathSet* path_set_of(const std::string& name) {
  for (const PathSet& set : path_sets()) {
    if (name.starts_with(set.name + std::string(":"))) return &set;
  }
  return nullptr;
}

std::string usage_of(const PathSet& set) {
  return set.name + std::string(":PATH takes ") + set.what;
}

}  // namespace

FoundFiles fetch_files(const std::string& name, const DatasetOptions& options,
                       const std::filesystem::path& folder, const std::function<FoundFiles()>& find,
                       const std::function<void(const FoundFiles&)>& fill) {
  const FoundFiles found = find();
  if (found.complete()) return found;
  if (!options.download) {
    std::vector<std::string> folders;
    std::error_code ignored;
    for (const auto& looked_in : found.looked_in)
      folders.push_back(std::filesystem::absolute(looked_in, ignored).string());
    throw DataError(name + " not found in " + join(folders, ", ") + ": " + found.folder.string() +
                        " lacks " + join(found.missing, ", "),
                    "--download fetches it, --data-dir (or LOCKSTEP_DATA_DIR) names another "
                    "folder, and the data set 'digits' needs no files");
  }
  fill_folder(
      folder, [&] { return find().complete(); }, [&] { fill(find()); });
  return find();
}

void fetch_dataset(const std::string& name, const DatasetOptions& options) {
  const DatasetOptions resolved = with_data_dir(options);
  if (const MnistLike* source = mnist_like(name)) fetch_mnist(*source, resolved);
  if (name == "cifar10") fetch_cifar10(resolved);
}

DatasetSplits load_dataset(const std::string& name, const DatasetOptions& options) {
  const DatasetOptions resolved = with_data_dir(options);
  const std::vector<std::string> names = dataset_names();
  if (std::ranges::find(names, name) != names.end()) expect_no_test_fraction(name, options);
  if (const MnistLike* source = mnist_like(name)) return load_mnist(*source, resolved);
  if (name == "cifar10") return load_cifar10(resolved);
  if (name == "digits") return load_digits(resolved);
  if (name == "random") return load_random(resolved);
  if (const PathSet* set = path_set_of(name)) {
    const std::string path = name.substr(name.find(':') + 1);
    if (path.empty()) throw UsageError("data set '" + name + "' names no file", usage_of(*set));
    return set->load(path, resolved);
  }
  throw UsageError(unknown_word("data set", name, dataset_names()));
}

DatasetSources open_dataset(const std::string& name, const DatasetOptions& options) {
  constexpr std::string_view kFolder = "folder:";
  if (name.starts_with(kFolder) && name.size() > kFolder.size()) {
    return open_image_folder(name.substr(kFolder.size()), options);
  }
  DatasetSplits splits = load_dataset(name, options);
  return {tensor_source(std::move(splits.train)), tensor_source(std::move(splits.test))};
}

std::optional<std::filesystem::path> dataset_folder(const std::string& name,
                                                    const DatasetOptions& options) {
  const std::filesystem::path data_dir = data_dir_or_default(options.data_dir);
  const MnistLike* source = mnist_like(name);
  if (!source && name != "cifar10")
    throw UsageError("data set '" + name + "' has no folder of files");
  FoundFiles found = source ? find_mnist(data_dir, *source) : find_cifar10(data_dir);
  return found.complete() ? std::optional(std::move(found.folder)) : std::nullopt;
}

std::vector<std::string> dataset_names() {
  return {"mnist", "fashion-mnist", "cifar10", "digits", "random"};
}

std::vector<std::string> path_dataset_names() {
  std::vector<std::string> names;
  for (const PathSet& set : path_sets()) names.push_back(set.name + std::string(":PATH"));
  return names;
}

void check_dataset_name(const std::string& flag, const std::string& name) {
  if (const PathSet* set = path_set_of(name)) {
    if (name.ends_with(':')) throw UsageError(flag + " " + name + " names no file", usage_of(*set));
    return;
  }
  std::vector<std::string> known = dataset_names();
  for (std::string& path : path_dataset_names()) known.push_back(std::move(path));
  expect_one_of(flag, name, known);
}

}  // namespace lockstep
