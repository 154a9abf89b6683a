#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/base/file.h"

namespace lockstep::tool {

/// The folder that holds MNIST's four files. It is looked for in `data_dir`, or, when that is
/// empty, in LOCKSTEP_DATA_DIR, else in "data". The folders below it where load_dataset looks count
/// too.
std::optional<std::filesystem::path> find_mnist_folder(const std::string& data_dir = {});

/// Images for benchmarks, which C++ and Python read from the same four files. They are MNIST where
/// it is found. Else they are as many of the built-in digits, written to a temporary folder.
class BenchData {
 public:
  static constexpr int64_t kTrainSamples = 60'000;
  explicit BenchData(const std::string& data_dir);
  const std::filesystem::path& folder() const { return folder_; }
  /// "mnist" or "digits".
  const std::string& name() const { return name_; }

 private:
  std::unique_ptr<TemporaryDirectory> made_;
  std::filesystem::path folder_;
  std::string name_;
};

}  // namespace lockstep::tool
