#include "lockstep/data/mnist.h"

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/data/content_reader.h"
#include "lockstep/data/download.h"
#include "lockstep/data/folder_lock.h"
#include "lockstep/data/idx.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kSide = 28;
constexpr int64_t kClasses = 10;

[[noreturn]] void throw_missing(const fs::path& data_dir, const MnistLike& source,
                                const MnistFolder& found) {
  std::error_code ignored;
  std::string message = source.name + " not found in " + fs::absolute(data_dir, ignored).string();
  if (!fs::exists(data_dir, ignored)) {
    message += ": there is no such folder";
  } else if (!fs::is_directory(data_dir, ignored)) {
    message += ": this is no folder";
  } else if (found.count() == 0) {
    message += ": looked there, in " + (data_dir / source.folders[0]).string() + " and in " +
               (data_dir / source.folders[1]).string() + " for " + source.files[0].name +
               "[.gz] and its three companions";
  } else {
    std::vector<std::string> missing;
    for (size_t i = 0; i < found.paths.size(); ++i) {
      if (found.paths[i].empty()) missing.push_back(source.files[i].name + "[.gz]");
    }
    message += ": " + found.folder.string() + " lacks " + join(missing, ", ");
  }
  throw DataError(message,
                  "--download fetches it, --data-dir (or LOCKSTEP_DATA_DIR) names another folder, "
                  "and the data set 'digits' needs no files");
}

using Unpacked = std::map<fs::path, std::span<const std::byte>>;

at::Tensor load(const fs::path& path, const Unpacked& unpacked) {
  const auto found = unpacked.find(path);
  if (found == unpacked.end()) return load_idx(path);
  log_debug("taken as it was unpacked before: " + path.string());
  return load_idx(path, found->second);
}

/// `what`: images or labels, of `dim` dimensions.
at::Tensor load_bytes(const fs::path& path, const Unpacked& unpacked, const char* what,
                      int64_t dim) {
  at::Tensor bytes = load(path, unpacked);
  if (bytes.scalar_type() == at::kByte && bytes.dim() == dim) return bytes;
  const auto wanted = std::to_string(dim);
  throw DataError(path.string() + ", byte 2: holds " + std::to_string(bytes.dim()) +
                      "-dimensional " + c10::toString(bytes.scalar_type()) + "; expected " + what +
                      ", " + wanted + "-dimensional Byte (00 00 08 0" + wanted + ")",
                  "are the files of images and labels exchanged?");
}

at::Tensor load_images(const fs::path& path, const Unpacked& unpacked) {
  at::Tensor images = load_bytes(path, unpacked, "images", 3);
  if (images.size(1) != kSide || images.size(2) != kSide) {
    throw DataError(path.string() + ", byte 8: images of " + std::to_string(images.size(1)) +
                    " x " + std::to_string(images.size(2)) + "; expected 28 x 28");
  }
  return images;
}

at::Tensor load_labels(const fs::path& path, const Unpacked& unpacked) {
  const at::Tensor labels = load_bytes(path, unpacked, "labels", 1);
  const auto* values = labels.const_data_ptr<uint8_t>();
  const auto* end = values + labels.numel();
  const auto* wrong = std::find_if(values, end, [](uint8_t label) { return label >= kClasses; });
  if (wrong != end) {
    constexpr int64_t kHeader = 8;
    throw DataError(path.string() + ", byte " + std::to_string(kHeader + (wrong - values)) +
                    ": the label of sample " + std::to_string(wrong - values) + " is " +
                    std::to_string(*wrong) + "; expected 0 to 9");
  }
  return labels.to(at::kLong);
}

}  // namespace

TensorDataset load_mnist_part(const std::string& name, const fs::path& images_path,
                              const fs::path& labels_path, const Unpacked& unpacked) {
  TensorDataset part;
  part.name = name;
  part.data = load_images(images_path, unpacked);
  part.targets = load_labels(labels_path, unpacked);
  part.num_classes = kClasses;
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

namespace {

/// Compares with the published checksum: of the content where it is known, so that another packing
/// of the same content is as good, else of the gzip file.
void verify(const fs::path& path, const MnistFile& expected) {
  using Packing = ContentOptions::Packing;
  const bool by_content = !expected.content_md5.empty();
  const std::string& wanted = by_content ? expected.content_md5 : expected.gzip_md5;
  const std::string found = content_hash(path, Hasher::Algorithm::md5,
                                         by_content ? Packing::detect_gzip : Packing::plain);
  if (found == wanted) return;
  throw DataError(path.string() + ": the MD5 of " +
                  (by_content ? "the decompressed content" : "the file") + " is " + found +
                  "; expected " + wanted + " for " + expected.name);
}

void fetch_missing(const MnistLike& source, const DatasetOptions& options,
                   const MnistFolder& found) {
  for (size_t i = 0; i < found.paths.size(); ++i) {
    if (!found.paths[i].empty()) continue;
    const MnistFile& file = source.files[i];
    std::vector<std::string> urls;
    for (const auto& mirror : mirrors(options.mirror, source.mirror_variable, source.mirrors))
      urls.push_back(mirror + file.name + ".gz");
    download(
        urls, found.folder / (file.name + ".gz"),
        [&file](const fs::path& path) { verify(path, file); }, options.transfer,
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

DatasetSplits load_mnist(const MnistLike& source, const DatasetOptions& options) {
  const auto find = [&] { return find_mnist(options.data_dir, source); };
  MnistFolder found = find();
  if (!found.complete()) {
    if (!options.download) throw_missing(options.data_dir, source, found);
    fill_folder(
        found.folder, [&] { return find().complete(); },
        [&] { fetch_missing(source, options, find()); }, options.lock_timeout);
    found = find();
  }
  const auto load_part = [&](size_t images) {
    return load_mnist_part(source.name, found.paths[images], found.paths[images + 1],
                           options.unpacked);
  };
  TensorDataset test = load_part(2);
  refuse_other_set(source, found.paths[3], test.targets);
  return {load_part(0), std::move(test)};
}

std::optional<fs::path> mnist_folder(const MnistLike& source, const fs::path& data_dir) {
  MnistFolder found = find_mnist(data_dir, source);
  return found.complete() ? std::optional(std::move(found.folder)) : std::nullopt;
}

}  // namespace lockstep
