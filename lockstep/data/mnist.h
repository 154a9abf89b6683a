#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>

#include "lockstep/data/dataset.h"
#include "lockstep/data/mnist_files.h"

namespace lockstep {

/// The first folder at or below `data_dir` that has all four files, plain or gzip.
std::optional<std::filesystem::path> mnist_folder(const MnistLike& source,
                                                  const std::filesystem::path& data_dir);

/// load_dataset for one of the two.
DatasetSplits load_mnist(const MnistLike& source, const DatasetOptions& options);

/// Images and labels of one part. Throws DataError for images that are not 28 x 28 bytes and for a
/// label above 9. Also for no images, and when there are not as many labels.
/// `unpacked`: DatasetOptions::unpacked.
TensorDataset load_mnist_part(
    const std::string& name, const std::filesystem::path& images,
    const std::filesystem::path& labels,
    const std::map<std::filesystem::path, std::span<const std::byte>>& unpacked = {});

}  // namespace lockstep
