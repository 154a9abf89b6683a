#include "lockstep/data/named_sets.h"

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/data/download.h"
#include "lockstep/data/idx.h"
#include "lockstep/data/tensor_bytes.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kMnistSide = 28;
constexpr int64_t kMnistClasses = 10;

using Unpacked = std::map<fs::path, std::span<const std::byte>>;

/// `what`: images or labels, each of this shape.
at::Tensor load_bytes(const fs::path& path, const Unpacked& unpacked, const std::string& what,
                      at::IntArrayRef shape) {
  const auto found = unpacked.find(path);
  if (found != unpacked.end()) log_debug("taken as it was unpacked before: " + path.string());
  const at::Tensor bytes = found == unpacked.end() ? load_idx(path) : load_idx(path, found->second);
  const auto dims = static_cast<int64_t>(shape.size()) + 1;
  if (bytes.dim() != dims)
    throw DataError(path.string() + ", byte 3: has " + std::to_string(bytes.dim()) +
                        " dimensions; expected " + what + ", which have " + std::to_string(dims),
                    "are the files of images and labels exchanged?");
  if (bytes.sizes().slice(1) != shape)
    throw DataError(path.string() + ", byte 8: " + what + " of " +
                    shape_text(bytes.sizes().slice(1)) + "; expected " + shape_text(shape));
  return bytes;
}

at::Tensor load_labels(const fs::path& path, const Unpacked& unpacked) {
  const at::Tensor labels = load_bytes(path, unpacked, "labels", {});
  const auto* values = labels.const_data_ptr<uint8_t>();
  const auto* end = values + labels.numel();
  const auto* wrong =
      std::find_if(values, end, [](uint8_t label) { return label >= kMnistClasses; });
  if (wrong != end) {
    constexpr int64_t kHeader = 8;
    throw DataError(path.string() + ", byte " + std::to_string(kHeader + (wrong - values)) +
                    ": the label of sample " + std::to_string(wrong - values) + " is " +
                    std::to_string(*wrong) + "; expected 0 to 9");
  }
  return labels.to(at::kLong);
}

TensorDataset load_part(const std::string& name, const fs::path& images_path,
                        const fs::path& labels_path, const Unpacked& unpacked) {
  TensorDataset part;
  part.name = name;
  part.data = load_bytes(images_path, unpacked, "images", {kMnistSide, kMnistSide});
  part.targets = load_labels(labels_path, unpacked);
  part.num_classes = kMnistClasses;
  if (part.data.size(0) != part.targets.size(0)) {
    throw DataError(images_path.string() + ", byte 4: " + std::to_string(part.data.size(0)) +
                        " images, but " + labels_path.string() + " has " +
                        std::to_string(part.targets.size(0)) + " labels; expected as many",
                    "the two files do not belong together");
  }
  if (part.size() == 0) {
    throw DataError(images_path.string() + ", byte 4: no images; expected at least one");
  }
  return part;
}

void fetch_missing(const MnistLike& source, const DatasetOptions& options,
                   const FoundFiles& found) {
  for (size_t i = 0; i < found.paths.size(); ++i) {
    if (!found.paths[i].empty()) continue;
    const MnistFile& file = source.files[i];
    std::vector<std::string> urls;
    for (const auto& mirror : mirrors(source.mirror_variable, source.mirrors))
      urls.push_back(mirror + file.name + ".gz");
    download(urls, found.folder / (file.name + ".gz"), file.gzip_md5, options.transfer,
             source.mirror_variable);
  }
}

/// Files of the same names make it easy to take one set for the other, which would train well and
/// mean nothing.
void refuse_other_set(const MnistLike& source, const fs::path& path, const at::Tensor& labels) {
  const bool is_mnist = source.name == mnist_source().name;
  const MnistLike& other = is_mnist ? fashion_mnist_source() : mnist_source();
  const auto& first = other.first_test_labels;
  const auto* begin = labels.const_data_ptr<int64_t>();
  if (!std::equal(first.begin(), first.end(), begin, begin + std::min<int64_t>(labels.numel(), 8)))
    return;
  throw DataError(path.string() + ", byte 8: these are the labels of " + other.name +
                      "; expected those of " + source.name,
                  "name another folder or the data set " + other.name);
}

}  // namespace

FoundFiles fetch_mnist(const MnistLike& source, const DatasetOptions& options) {
  const auto find = [&] { return find_mnist(options.data_dir, source); };
  return fetch_files(source.name, options, find().folder, find,
                     [&](const FoundFiles& found) { fetch_missing(source, options, found); });
}

DatasetSplits load_mnist(const MnistLike& source, const DatasetOptions& options) {
  const auto paths = fetch_mnist(source, options).paths;
  TensorDataset test = load_part(source.name, paths[2], paths[3], options.unpacked);
  refuse_other_set(source, paths[3], test.targets);
  return {load_part(source.name, paths[0], paths[1], options.unpacked), std::move(test)};
}

}  // namespace lockstep
