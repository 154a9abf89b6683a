#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "lockstep/data/dataset.h"

namespace lockstep {

/// Where the archive of CIFAR-10's binary version comes from.
struct Cifar10Source {
  /// As the set's own page gives it.
  std::string archive_md5 = "c32a1d4ab5d03f1284b67883e8d87530";
  std::string mirror = "https://www.cs.toronto.edu/~kriz/";
};

/// load_dataset's "cifar10". See there.
DatasetSplits load_cifar10(const DatasetOptions& options, const Cifar10Source& source = {});

/// The folder at or below `data_dir` that has the six files of CIFAR-10's binary version.
std::optional<std::filesystem::path> cifar10_folder(const std::filesystem::path& data_dir);

}  // namespace lockstep
