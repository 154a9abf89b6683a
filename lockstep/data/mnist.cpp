#include "lockstep/data/mnist.h"

#include <algorithm>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
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

using Paths = std::array<fs::path, 4>;

/// The files of a folder, each plain or gzip; an empty path for one that is not there.
Paths files_in(const fs::path& folder, const MnistLike& source) {
  Paths paths;
  for (size_t i = 0; i < paths.size(); ++i) {
    const fs::path plain = folder / source.files[i].name;
    const fs::path gzip = folder / (source.files[i].name + ".gz");
    std::error_code ignored;
    if (fs::exists(plain, ignored)) {
      paths[i] = plain;
    } else if (fs::exists(gzip, ignored)) {
      paths[i] = gzip;
    }
  }
  return paths;
}

size_t found_count(const Paths& paths) {
  return static_cast<size_t>(std::count_if(paths.begin(), paths.end(),
                                           [](const fs::path& path) { return !path.empty(); }));
}

struct Found {
  fs::path folder;
  Paths paths;
  bool complete() const { return found_count(paths) == paths.size(); }
};

/// The first folder that has all four files, else the one that has most of them.
Found find_files(const fs::path& data_dir, const MnistLike& source) {
  std::vector<fs::path> folders;
  for (const fs::path& folder : source.folders) folders.push_back(data_dir / folder);
  folders.push_back(data_dir);
  Found best{folders.front(), files_in(folders.front(), source)};
  for (const fs::path& folder : folders) {
    Found found{folder, files_in(folder, source)};
    if (found_count(found.paths) > found_count(best.paths)) best = std::move(found);
  }
  return best;
}

[[noreturn]] void throw_missing(const fs::path& data_dir, const MnistLike& source,
                                const Found& found) {
  std::error_code ignored;
  std::string message = source.name + " not found in " + fs::absolute(data_dir, ignored).string();
  if (!fs::exists(data_dir, ignored)) {
    message += ": there is no such folder";
  } else if (!fs::is_directory(data_dir, ignored)) {
    message += ": this is no folder";
  } else if (found_count(found.paths) == 0) {
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

at::Tensor load_images(const fs::path& path) {
  at::Tensor images = load_idx(path);
  if (images.scalar_type() != at::kByte || images.dim() != 3) {
    throw DataError(path.string() + ", byte 2: holds " + std::to_string(images.dim()) +
                        "-dimensional " + c10::toString(images.scalar_type()) +
                        "; expected images, 3-dimensional Byte (00 00 08 03)",
                    "are the files of images and labels exchanged?");
  }
  if (images.size(1) != kSide || images.size(2) != kSide) {
    throw DataError(path.string() + ", byte 8: images of " + std::to_string(images.size(1)) +
                    " x " + std::to_string(images.size(2)) + "; expected 28 x 28");
  }
  return images;
}

at::Tensor load_labels(const fs::path& path) {
  const at::Tensor labels = load_idx(path);
  if (labels.scalar_type() != at::kByte || labels.dim() != 1) {
    throw DataError(path.string() + ", byte 2: holds " + std::to_string(labels.dim()) +
                        "-dimensional " + c10::toString(labels.scalar_type()) +
                        "; expected labels, 1-dimensional Byte (00 00 08 01)",
                    "are the files of images and labels exchanged?");
  }
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
                              const fs::path& labels_path) {
  TensorDataset part;
  part.name = name;
  part.data = load_images(images_path);
  part.targets = load_labels(labels_path);
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

/// The base URLs to fetch from, each ending in a slash.
std::vector<std::string> mirrors_of(const MnistLike& source, const DatasetOptions& options) {
  std::string chosen = options.mirror;
  if (chosen.empty()) chosen = env_string(source.mirror_variable).value_or("");
  if (chosen.empty()) return source.mirrors;
  if (!chosen.ends_with('/')) chosen += '/';
  return {chosen};
}

std::string content_md5(const fs::path& path, ContentOptions::Packing packing) {
  return content_hash(path, Hasher::Algorithm::md5, packing);
}

/// Compares with the published checksum: of the content where it is known, so that another packing
/// of the same content is as good, else of the gzip file.
void verify(const fs::path& path, const MnistFile& expected) {
  using Packing = ContentOptions::Packing;
  const bool by_content = !expected.content_md5.empty();
  const std::string& wanted = by_content ? expected.content_md5 : expected.gzip_md5;
  const std::string found = content_md5(path, by_content ? Packing::detect_gzip : Packing::plain);
  if (found == wanted) return;
  throw DataError(path.string() + ": the MD5 of " +
                  (by_content ? "the decompressed content" : "the file") + " is " + found +
                  "; expected " + wanted + " for " + expected.name);
}

void fetch_missing(const MnistLike& source, const DatasetOptions& options, const Found& found) {
  for (size_t i = 0; i < found.paths.size(); ++i) {
    if (!found.paths[i].empty()) continue;
    const MnistFile& file = source.files[i];
    std::vector<std::string> urls;
    for (const std::string& mirror : mirrors_of(source, options)) {
      urls.push_back(mirror + file.name + ".gz");
    }
    download(
        urls, found.folder / (file.name + ".gz"),
        [&file](const fs::path& path) { verify(path, file); }, options.transfer);
  }
}

/// Downloads what is missing, in one process of this host; the others wait for it.
Found download_missing(const MnistLike& source, const DatasetOptions& options) {
  const fs::path folder = find_files(options.data_dir, source).folder;
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw SystemError("cannot make the folder " + folder.string(), error.value());
  const auto filled = [&] { return find_files(options.data_dir, source).complete(); };
  const auto lock =
      FolderLock::acquire(folder, filled, FolderLock::for_downloads(options.lock_timeout));
  if (lock) fetch_missing(source, options, find_files(options.data_dir, source));
  return find_files(options.data_dir, source);
}

/// Files of the same names make it easy to take one set for the other, which would train well and
/// mean nothing.
void refuse_other_set(const MnistLike& source, const Paths& paths) {
  const MnistLike& other =
      source.name == mnist_source().name ? fashion_mnist_source() : mnist_source();
  const MnistFile& labels = other.files[3];
  using Packing = ContentOptions::Packing;
  const bool same_gzip = content_md5(paths[3], Packing::plain) == labels.gzip_md5;
  const bool same_content = !labels.content_md5.empty() &&
                            content_md5(paths[3], Packing::detect_gzip) == labels.content_md5;
  if (same_gzip || same_content) {
    throw DataError(paths[3].string() + ", byte 0: these are the labels of " + other.name +
                        "; expected those of " + source.name,
                    "name another folder or the data set " + other.name);
  }
}

}  // namespace

DatasetSplits load_mnist(const MnistLike& source, const DatasetOptions& options) {
  Found found = find_files(options.data_dir, source);
  if (!found.complete()) {
    if (!options.download) throw_missing(options.data_dir, source, found);
    found = download_missing(source, options);
  }
  refuse_other_set(source, found.paths);
  return {load_mnist_part(source.name, found.paths[0], found.paths[1]),
          load_mnist_part(source.name, found.paths[2], found.paths[3])};
}

std::optional<fs::path> mnist_folder(const MnistLike& source, const fs::path& data_dir) {
  Found found = find_files(data_dir, source);
  return found.complete() ? std::optional(std::move(found.folder)) : std::nullopt;
}

const MnistLike* mnist_like(const std::string& name) {
  for (const MnistLike* source : {&mnist_source(), &fashion_mnist_source()}) {
    if (source->name == name) return source;
  }
  return nullptr;
}

const MnistLike& mnist_source() {
  static const MnistLike source{
      .name = "mnist",
      .folders = {"mnist", "MNIST/raw"},
      .files = {{{"train-images-idx3-ubyte", "6bbc9ace898e44ae57da46a324031adb",
                  "f68b3c2dcbeaaa9fbdd348bbdeb94873"},
                 {"train-labels-idx1-ubyte", "a25bea736e30d166cdddb491f175f624",
                  "d53e105ee54ea40749a09fcbcd1e9432"},
                 {"t10k-images-idx3-ubyte", "2646ac647ad5339dbf082846283269ea",
                  "9fb629c4189551a2d022fa330f9573f3"},
                 {"t10k-labels-idx1-ubyte", "27ae3e4e09519cfbb04c329615203637",
                  "ec29112dd5afa0611ce80d1b7f02629c"}}},
      .mirror_variable = "LOCKSTEP_MNIST_URL",
      .mirrors = {"https://ossci-datasets.s3.amazonaws.com/mnist/"}};
  return source;
}

const MnistLike& fashion_mnist_source() {
  static const MnistLike source{
      .name = "fashion-mnist",
      .folders = {"fashion-mnist", "FashionMNIST/raw"},
      .files = {{{"train-images-idx3-ubyte", "", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"},
                 {"train-labels-idx1-ubyte", "", "25c81989df183df01b3e8a0aad5dffbe"},
                 {"t10k-images-idx3-ubyte", "", "bef4ecab320f06d8554ea6380940ec79"},
                 {"t10k-labels-idx1-ubyte", "", "bb300cfdad3c16e7a12a480ee83cd310"}}},
      .mirror_variable = "LOCKSTEP_FASHION_MNIST_URL",
      .mirrors = {
          "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
          "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"}};
  return source;
}

}  // namespace lockstep
