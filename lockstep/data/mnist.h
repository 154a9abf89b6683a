#pragma once

#include <array>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/data/dataset.h"

namespace lockstep {

/// One of the four files of MNIST or of a set published in its form.
struct MnistFile {
  std::string name;         ///< Without ".gz".
  std::string content_md5;  ///< Of the decompressed content; empty when not known.
  std::string gzip_md5;     ///< Of the published .gz file; empty when not known.
};

/// A data set published as MNIST is: four IDX files of 28 x 28 images and labels of ten classes.
struct MnistLike {
  std::string name;
  std::vector<std::filesystem::path> folders;  ///< Below data_dir, in the order they are looked in.
  std::array<MnistFile, 4> files;    ///< Train images, train labels, test images, test labels.
  std::string mirror_variable;       ///< The environment variable that names another base URL.
  std::vector<std::string> mirrors;  ///< Base URLs, ending in a slash.
};

const MnistLike& mnist_source();
const MnistLike& fashion_mnist_source();
/// Null for any other name than mnist and fashion-mnist.
const MnistLike* mnist_like(const std::string& name);

/// The first folder at or below `data_dir` that has all four files, plain or gzip.
std::optional<std::filesystem::path> mnist_folder(const MnistLike& source,
                                                  const std::filesystem::path& data_dir);

/// load_dataset for one of the two.
DatasetSplits load_mnist(const MnistLike& source, const DatasetOptions& options);

/// Images and labels of one part. Throws DataError for images that are not 28 x 28 bytes and for a
/// label above 9. Also for no images, and when there are not as many labels.
TensorDataset load_mnist_part(const std::string& name, const std::filesystem::path& images,
                              const std::filesystem::path& labels);

}  // namespace lockstep
