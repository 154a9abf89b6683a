// MNIST for the example programs, or the built-in digits where there is no MNIST.
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>

#include "lockstep/base/env.h"
#include "lockstep/base/log.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/mnist.h"

namespace examples {

/// The default of --data-dir.
inline std::string default_data_dir() {
  return lockstep::env_string("LOCKSTEP_DATA_DIR").value_or("./data");
}

/// True when the training images lie in `data_dir`, plain or compressed.
inline bool files_are_there(const lockstep::MnistLike& source,
                            const std::filesystem::path& data_dir) {
  const std::string& name = source.files.front().name;
  const auto holds = [&](const std::filesystem::path& folder) {
    return std::filesystem::exists(folder / name) ||
           std::filesystem::exists(folder / (name + ".gz"));
  };
  return holds(data_dir) ||
         std::any_of(source.folders.begin(), source.folders.end(),
                     [&](const auto& folder) { return holds(data_dir / folder); });
}

/// The first `limit` samples; all of them for 0.
inline lockstep::TensorDataset first_samples(lockstep::TensorDataset dataset, int64_t limit) {
  if (limit > 0 && limit < dataset.size()) {
    dataset.data = dataset.data.narrow(0, 0, limit);
    dataset.targets = dataset.targets.narrow(0, 0, limit);
  }
  return dataset;
}

struct DataOptions {
  std::string dir = default_data_dir();
  bool download = false;  ///< Fetch the files when they are not in `dir`.
  int64_t limit = 0;      ///< Train on so many samples only, for a quick look; 0: on all.
};

/// MNIST or Fashion-MNIST (28 x 28 pixels, ten classes) from `options.dir`, downloaded when asked
/// for. Where it is not there, rank 0 says so and the built-in digits, of the same shape, serve.
inline lockstep::DatasetSplits images(const lockstep::MnistLike& source,
                                      const DataOptions& options) {
  lockstep::DatasetOptions dataset_options;
  dataset_options.data_dir = options.dir;
  dataset_options.download = options.download;
  std::string name = source.name;
  if (!options.download && !files_are_there(source, options.dir)) {
    lockstep::log_info("no " + name + " in " + options.dir +
                       ": training on the built-in digits instead (--download fetches it, "
                       "--data-dir DIR says where it is)");
    name = "digits";
  }
  auto splits = lockstep::load_dataset(name, dataset_options);
  splits.train = first_samples(splits.train, options.limit);
  splits.test = first_samples(splits.test, options.limit);
  return splits;
}

inline lockstep::DatasetSplits mnist(const DataOptions& options) {
  return images(lockstep::mnist_source(), options);
}

}  // namespace examples
