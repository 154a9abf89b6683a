// MNIST for the example programs, or the built-in digits where there is no MNIST.
#pragma once

#include <optional>
#include <string>

#include "common/program.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/data/dataset.h"

namespace examples {

/// The first `limit` samples; all of them for 0.
inline lockstep::TensorDataset first_samples(lockstep::TensorDataset dataset, int64_t limit) {
  if (limit > 0 && limit < dataset.size()) {
    dataset.data = dataset.data.narrow(0, 0, limit);
    dataset.targets = dataset.targets.narrow(0, 0, limit);
  }
  return dataset;
}

struct DataOptions {
  std::optional<std::string> dir;  ///< None: LOCKSTEP_DATA_DIR, else ./data.
  bool download = false;           ///< Fetch the files when they are not in `dir`.
  int64_t limit = 0;               ///< Train on so many samples only, for a quick look; 0: on all.
};

/// The flags for them.
inline void add_data_flags(Flags& flags, DataOptions& options, const std::string& set = "MNIST") {
  flags.option("--data-dir", options.dir,
               "Where " + set + " lies (default: LOCKSTEP_DATA_DIR, else ./data)", "DIR");
  flags.flag("--download", options.download, "Fetch " + set + " when it is not there");
  flags.option("--limit", options.limit, "Use so many samples only; 0: all", {0});
}

/// mnist or fashion-mnist (28 x 28 pixels, ten classes) from `options.dir`, downloaded when asked
/// for. When no folder was named and the default one does not hold the set, the built-in digits
/// serve. They have the same shape, and rank 0 says so. Throws DataError when a named folder does
/// not hold it.
inline lockstep::DatasetSplits images(std::string name, const DataOptions& options) {
  lockstep::DatasetOptions dataset_options;
  dataset_options.data_dir =
      options.dir.value_or(lockstep::env_string("LOCKSTEP_DATA_DIR").value_or("./data"));
  dataset_options.download = options.download;
  if (!options.download && !lockstep::dataset_folder(name, dataset_options)) {
    const auto missing = "no complete " + name + " in " + dataset_options.data_dir.string();
    if (options.dir) {
      throw lockstep::DataError(missing,
                                "--download fetches it, --data-dir names another folder, and "
                                "without --data-dir the built-in digits serve");
    }
    lockstep::log_info(missing +
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
  return images("mnist", options);
}

}  // namespace examples
