#include "tools/lockstep/mnist_folder.h"

#include <ATen/core/Tensor.h>

#include "lockstep/base/error.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/mnist_files.h"

namespace lockstep::tool {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kTestSamples = 10'000;

/// The IDX format: two zeros, the type (8: unsigned byte), the number of dimensions, their sizes as
/// big-endian 32-bit numbers, the bytes.
void write_idx(const fs::path& path, const at::Tensor& tensor) {
  const at::Tensor bytes = tensor.to(at::kByte).contiguous();
  std::string content = {0, 0, 8, static_cast<char>(bytes.dim())};
  for (const int64_t size : bytes.sizes()) {
    for (int shift = 24; shift >= 0; shift -= 8) content += static_cast<char>(size >> shift);
  }
  content.append(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  write_file_atomically(path, content);
}

}  // namespace

std::optional<fs::path> find_mnist_folder(const std::string& data_dir) {
  const auto folder = dataset_folder("mnist", {.data_dir = data_dir});
  return folder ? std::optional(fs::absolute(*folder)) : std::nullopt;
}

BenchData::BenchData(const std::string& data_dir) {
  if (const auto folder = find_mnist_folder(data_dir)) {
    folder_ = *folder;
    name_ = "mnist";
    return;
  }
  if (!data_dir.empty()) throw DataError("no MNIST in '" + data_dir + "'");
  made_ = std::make_unique<TemporaryDirectory>("lockstep-bench-data");
  folder_ = made_->path();
  name_ = "digits";
  DatasetOptions options;
  options.digits_train = kTrainSamples;
  options.digits_test = kTestSamples;
  const auto digits = load_dataset("digits", options);
  const auto& files = mnist_source().files;
  write_idx(folder_ / files[0].name, digits.train.data);
  write_idx(folder_ / files[1].name, digits.train.targets);
  write_idx(folder_ / files[2].name, digits.test.data);
  write_idx(folder_ / files[3].name, digits.test.targets);
}

}  // namespace lockstep::tool
