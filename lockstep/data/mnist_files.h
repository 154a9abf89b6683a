#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace lockstep {

/// One of the four files of MNIST or of a set published in its form.
struct MnistFile {
  std::string name;      ///< Without ".gz".
  std::string gzip_md5;  ///< Of the published .gz file.
};

/// A dataset published as MNIST is: four IDX files of 28 x 28 images and labels of ten classes.
struct MnistLike {
  std::string name;
  std::vector<std::filesystem::path> folders;  ///< Below data_dir, in the order they are looked in.
  std::array<MnistFile, 4> files;  ///< Train images, train labels, test images, test labels.
  std::array<uint8_t, 8> first_test_labels;  ///< The test part's, as published: no other set's.
  std::string mirror_variable;       ///< The environment variable that names another base URL.
  std::vector<std::string> mirrors;  ///< Base URLs, ending in a slash.
};

const MnistLike& mnist_source();
const MnistLike& fashion_mnist_source();
/// Null for any other name than mnist and fashion-mnist.
const MnistLike* mnist_like(const std::string& name);

/// What of a set of files lies in one folder.
struct FoundFiles {
  std::vector<std::filesystem::path> looked_in;
  std::filesystem::path folder;              ///< One of them.
  std::vector<std::filesystem::path> paths;  ///< In the order of the names; empty: absent.
  std::vector<std::string> missing;          ///< The names of those that are absent.
  bool complete() const { return missing.empty(); }
};

/// The first of the folders that has all files. Else the one that has most of them. A file may have
/// the ending `packed` after its name.
FoundFiles find_files(const std::vector<std::filesystem::path>& folders,
                      const std::vector<std::string>& names, const std::string& packed = {});

/// Its files at or below `data_dir`, each plain or gzip.
FoundFiles find_mnist(const std::filesystem::path& data_dir, const MnistLike& source);

/// DatasetOptions::data_dir, or what stands for it where it is empty.
std::filesystem::path data_dir_or_default(const std::filesystem::path& given);

}  // namespace lockstep
