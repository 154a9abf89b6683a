#include "lockstep/data/named_sets.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/data/npy.h"
#include "lockstep/data/safetensors.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

/// The names a pair of tensors may have; Keras' npz files have the last ones.
struct PairNames {
  const char* data;
  const char* targets;
};
constexpr std::array<PairNames, 6> kTrainNames{{{"data", "targets"},
                                                {"x", "y"},
                                                {"images", "labels"},
                                                {"train_data", "train_targets"},
                                                {"train_images", "train_labels"},
                                                {"x_train", "y_train"}}};
constexpr std::array<PairNames, 4> kTestNames{{{"test_data", "test_targets"},
                                               {"test_images", "test_labels"},
                                               {"x_test", "y_test"},
                                               {"test_x", "test_y"}}};

StateDict load_npy_folder(const fs::path& folder) {
  StateDict tensors;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".npy") continue;
    tensors.emplace_back(entry.path().stem().string(), load_npy(entry.path()));
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  return tensors;
}

StateDict load_tensors(const fs::path& path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) return load_npy_folder(path);
  if (!fs::exists(path, ignored)) {
    throw DataError(path.string() + ": there is no such file or folder",
                    "file: takes a .safetensors or .npz file or a folder of .npy files");
  }
  const std::string extension = to_lower(path.extension().string());
  if (extension == ".safetensors") return load_safetensors(path).tensors;
  if (extension == ".npz") return load_npz(path);
  if (extension == ".npy") {
    throw UsageError(path.string() + " is one array; expected data and targets",
                     "name the folder that holds data.npy and targets.npy");
  }
  throw UsageError(path.string() + " has the extension '" + extension +
                   "'; expected a .safetensors or .npz file or a folder of .npy files");
}

const at::Tensor* find(const StateDict& tensors, const std::string& name) {
  for (const auto& [known, tensor] : tensors) {
    if (known == name) return &tensor;
  }
  return nullptr;
}

struct Pair {
  at::Tensor data;
  at::Tensor targets;
};

template <size_t N>
std::optional<Pair> find_pair(const fs::path& path, const StateDict& tensors,
                              const std::array<PairNames, N>& names) {
  for (const PairNames& pair : names) {
    const at::Tensor* data = find(tensors, pair.data);
    const at::Tensor* targets = find(tensors, pair.targets);
    if (data && targets) return Pair{*data, *targets};
    if (data || targets) {
      throw DataError(path.string() + " has " + (data ? pair.data : pair.targets) + " but no " +
                      (data ? pair.targets : pair.data));
    }
  }
  return std::nullopt;
}

/// Class indices as int64 [N]; what regression aims at as float32 [N, K].
at::Tensor normalized_targets(const fs::path& path, at::Tensor targets) {
  if (targets.is_complex()) throw DataError(path.string() + ": the targets are complex numbers");
  if (targets.is_floating_point()) {
    targets = targets.to(at::kFloat);
    return targets.dim() == 1 ? targets.unsqueeze(1) : targets;
  }
  if (targets.dim() == 2 && targets.size(1) == 1) targets = targets.squeeze(1);
  if (targets.dim() != 1) {
    throw DataError(path.string() + ": targets of " + std::to_string(targets.dim()) +
                        " dimensions; expected one class index a sample",
                    "store one-hot targets as their indices, or as float32 for regression");
  }
  targets = targets.to(at::kLong).contiguous();
  const auto* values = targets.const_data_ptr<int64_t>();
  const auto* end = values + targets.numel();
  const auto* wrong = std::find_if(values, end, [](int64_t label) { return label < 0; });
  if (wrong != end) {
    throw DataError(path.string() + ": the target of sample " + std::to_string(wrong - values) +
                    " is " + std::to_string(*wrong) + "; expected a class index of 0 or more");
  }
  return targets;
}

TensorDataset checked(const fs::path& path, const std::string& part, const Pair& pair) {
  const std::string name = "file:" + path.string();
  if (pair.data.dim() == 0 || pair.targets.dim() == 0 ||
      pair.data.size(0) != pair.targets.size(0) || pair.data.size(0) == 0) {
    const auto rows = [](const at::Tensor& tensor) {
      return tensor.dim() == 0 ? std::string("no rows") : std::to_string(tensor.size(0)) + " rows";
    };
    throw DataError(path.string() + ": the " + part + " part has " + rows(pair.data) +
                    " of data and " + rows(pair.targets) +
                    " of targets; expected as many, at least one");
  }
  return {name, pair.data.contiguous(), normalized_targets(path, pair.targets), 0};
}

DatasetSplits split(const fs::path& path, const TensorDataset& all, double test_fraction) {
  if (all.size() < 2) {
    throw DataError(path.string() + ": one sample only; expected two at least, to hold one out");
  }
  const auto wanted = std::llround(static_cast<double>(all.size()) * test_fraction);
  const int64_t held_out = std::clamp<int64_t>(wanted, 1, all.size() - 1);
  const auto part = [&](int64_t begin, int64_t end) {
    return TensorDataset{all.name, all.data.slice(0, begin, end), all.targets.slice(0, begin, end),
                         0};
  };
  return {part(0, all.size() - held_out), part(all.size() - held_out, all.size())};
}

void count_classes(const fs::path& path, DatasetSplits& splits) {
  if (splits.train.targets.scalar_type() != splits.test.targets.scalar_type() ||
      splits.train.data.sizes().slice(1) != splits.test.data.sizes().slice(1) ||
      splits.train.data.scalar_type() != splits.test.data.scalar_type()) {
    throw DataError(path.string() +
                    ": the train and test parts differ in dtype or in the shape of a sample");
  }
  if (splits.train.targets.scalar_type() != at::kLong) return;
  const int64_t classes = std::max(splits.train.targets.max().item<int64_t>(),
                                   splits.test.targets.max().item<int64_t>()) +
                          1;
  splits.train.num_classes = splits.test.num_classes = classes;
}

}  // namespace

double test_fraction_of(const DatasetOptions& options) {
  const double test_fraction = options.test_fraction.value_or(0.1);
  if (test_fraction > 0 && test_fraction < 1) return test_fraction;
  throw UsageError("test_fraction is " + std::to_string(test_fraction) +
                   "; expected more than 0 and less than 1");
}

void expect_no_test_fraction(const std::string& name, const DatasetOptions& options) {
  if (!options.test_fraction) return;
  throw UsageError("test_fraction is " + std::to_string(*options.test_fraction) + ", but dataset " +
                       name + " has a test part of its own, which is held out",
                   "leave the fraction out");
}

DatasetSplits load_tensor_dataset(const fs::path& path, const DatasetOptions& options) {
  const StateDict tensors = load_tensors(path);
  const auto train = find_pair(path, tensors, kTrainNames);
  if (!train) {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : tensors) names.push_back(name);
    throw DataError(path.string() + " has no tensors named data and targets, x and y, or images " +
                    "and labels; it has " + (names.empty() ? "none" : join(names, ", ")));
  }
  const auto test = find_pair(path, tensors, kTestNames);
  const TensorDataset learned = checked(path, "train", *train);
  if (test) expect_no_test_fraction("file:" + path.string(), options);
  DatasetSplits splits = test ? DatasetSplits{learned, checked(path, "test", *test)}
                              : split(path, learned, test_fraction_of(options));
  count_classes(path, splits);
  return splits;
}

}  // namespace lockstep
