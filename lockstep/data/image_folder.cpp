#include "lockstep/data/image_folder.h"

#include <ATen/ops/_upsample_bilinear2d_aa.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/data/named_sets.h"
#include "lockstep/data/rgb_image.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

/// What torchvision would read and we do not.
bool is_foreign_image(const fs::path& path) {
  const std::string extension = to_lower(path.extension().string());
  for (const char* other : {".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"}) {
    if (extension == other) return true;
  }
  return false;
}

std::vector<fs::path> subfolders(const fs::path& folder) {
  std::vector<fs::path> found;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (entry.is_directory()) found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

/// The images at and below a folder: of each folder by name, folders by path, as os.walk sorted.
std::vector<fs::path> images_below(const fs::path& top, int64_t& foreign) {
  std::map<std::string, std::vector<fs::path>> by_folder;
  using Walk = fs::recursive_directory_iterator;
  for (const auto& entry : Walk(top, fs::directory_options::follow_directory_symlink)) {
    if (!entry.is_regular_file()) continue;
    foreign += is_foreign_image(entry.path());
    if (is_image_name(entry.path())) {
      by_folder[entry.path().parent_path().string()].push_back(entry.path());
    }
  }
  std::vector<fs::path> images;
  for (auto& [folder, files] : by_folder) {
    std::sort(files.begin(), files.end());
    images.insert(images.end(), files.begin(), files.end());
  }
  return images;
}

/// Python's round: to the nearest, halves to the even one.
int64_t rounded_half(int64_t twice) {
  return (twice / 2) + (twice % 2 != 0 && (twice / 2) % 2 != 0);
}

class ImageSource : public SampleSource {
 public:
  ImageSource(std::shared_ptr<const ImageList> list, const ImageFolderOptions& options)
      : list_(std::move(list)), options_(options) {
    if (options.crop < 1 || options.resize < options.crop) {
      throw UsageError("images scaled to " + std::to_string(options.resize) +
                       " cannot have the middle " + std::to_string(options.crop) +
                       " cut out; expected at least 1, and no more than they are scaled to");
    }
  }

  std::string name() const override { return list_->name; }
  int64_t size() const override { return static_cast<int64_t>(list_->images.size()); }
  SampleSpec data_spec() const override { return {{3, options_.crop, options_.crop}, at::kByte}; }
  SampleSpec target_spec() const override { return {{}, at::kLong}; }
  std::vector<std::string> classes() const override { return list_->classes; }
  int64_t num_classes() const override { return static_cast<int64_t>(list_->classes.size()); }
  std::unique_ptr<SampleSource> clone() const override {
    return std::make_unique<ImageSource>(*this);
  }

  void read(std::span<const int64_t> indices, const at::Tensor& data,
            const at::Tensor& target) override {
    auto* classes = target.mutable_data_ptr<int64_t>();
    for (size_t i = 0; i < indices.size(); ++i) {
      const auto& [path, label] = list_->images.at(static_cast<size_t>(indices[i]));
      classes[i] = label;
      if (data.defined()) data.select(0, static_cast<int64_t>(i)).copy_(cropped(path));
    }
  }

 private:
  /// [3, crop, crop], a view of a larger image.
  at::Tensor cropped(const fs::path& path) const {
    RgbImage image = read_image(path);
    const int64_t height = image.height, width = image.width;
    at::Tensor pixels =
        at::from_blob(image.pixels.data(), {1, 3, height, width},
                      {height * width * 3, 1, width * 3, 3}, at::TensorOptions(at::kByte));
    const int64_t shorter = std::min(height, width), longer = std::max(height, width);
    const int64_t other = options_.resize * longer / shorter;
    const int64_t to_height = height <= width ? options_.resize : other;
    const int64_t to_width = height <= width ? other : options_.resize;
    // Where nothing changes, the view's memory goes with `image`.
    pixels = to_height == height && to_width == width
                 ? pixels.clone()
                 : at::_upsample_bilinear2d_aa(pixels, {to_height, to_width},
                                               /*align_corners=*/false);
    const int64_t top = rounded_half(to_height - options_.crop);
    const int64_t left = rounded_half(to_width - options_.crop);
    return pixels[0].narrow(1, top, options_.crop).narrow(2, left, options_.crop);
  }

  std::shared_ptr<const ImageList> list_;
  ImageFolderOptions options_;
};

/// The folder of a part below `path`; empty when there is none.
fs::path part_of(const fs::path& path, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    std::error_code ignored;
    if (fs::is_directory(path / name, ignored)) return path / name;
  }
  return {};
}

/// Holds out the last images of each class, so that every class is in both parts.
std::pair<ImageList, ImageList> split(const ImageList& all, double test_fraction) {
  check_test_fraction(test_fraction);
  std::vector<int64_t> count(all.classes.size()), seen(all.classes.size());
  for (const auto& [path, label] : all.images) ++count[label];
  ImageList train{all.name, all.classes, {}}, test = train;
  for (const auto& image : all.images) {
    const int64_t of_class = count[image.second];
    const auto wanted = std::llround(static_cast<double>(of_class) * test_fraction);
    const int64_t held_out = of_class < 2 ? 0 : std::clamp<int64_t>(wanted, 1, of_class - 1);
    const bool in_train = seen[image.second]++ < of_class - held_out;
    (in_train ? train : test).images.push_back(image);
  }
  if (test.images.empty()) {
    throw DataError(all.name + ": one image a class only; expected two at least, to hold one out");
  }
  return {std::move(train), std::move(test)};
}

}  // namespace

ImageList list_images(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored)) {
    throw DataError(folder.string() + ": there is no such folder",
                    "folder: takes a folder with a folder of images for each class");
  }
  ImageList list;
  list.name = "folder:" + folder.string();
  int64_t foreign = 0;
  for (const fs::path& path : subfolders(folder)) {
    const std::vector<fs::path> images = images_below(path, foreign);
    if (images.empty()) {
      throw DataError(path.string() + ": this class has no image; expected .jpg, .jpeg or .png",
                      "take the folder away, or put images into it");
    }
    const auto label = static_cast<int64_t>(list.classes.size());
    for (const fs::path& image : images) list.images.emplace_back(image, label);
    list.classes.push_back(path.filename().string());
  }
  if (list.classes.empty()) {
    throw DataError(folder.string() + " has no folders; expected one for each class",
                    "put the images of a class into a folder with the class's name");
  }
  if (foreign > 0) {
    log_warning(folder.string() + ": " + counted(foreign, "image") +
                " of other formats than JPEG and PNG left out");
  }
  return list;
}

std::unique_ptr<SampleSource> image_source(ImageList list, const ImageFolderOptions& options) {
  return std::make_unique<ImageSource>(std::make_shared<const ImageList>(std::move(list)), options);
}

DatasetSources open_image_folder(const fs::path& path, const DatasetOptions& options) {
  // 256 for 224, as the recipes for ImageNet have it.
  const int64_t resize = options.image_size * 8 / 7;
  const int64_t train_size =
      options.train_image_size > 0 ? options.train_image_size : options.image_size;
  const fs::path train_folder = part_of(path, {"train"});
  ImageList train, test;
  if (train_folder.empty()) {
    std::tie(train, test) = split(list_images(path), options.test_fraction);
  } else if (const fs::path test_folder = part_of(path, {"val", "test"}); test_folder.empty()) {
    std::tie(train, test) = split(list_images(train_folder), options.test_fraction);
  } else {
    train = list_images(train_folder);
    test = list_images(test_folder);
    if (train.classes != test.classes) {
      throw DataError(test_folder.string() + " has the classes " + join(test.classes, ", ") +
                          ", but " + train_folder.string() + " has " + join(train.classes, ", "),
                      "both parts need the same folders");
    }
  }
  train.name = test.name = "folder:" + path.string();
  return {image_source(std::move(train), {.resize = resize, .crop = train_size}),
          image_source(std::move(test), {.resize = resize, .crop = options.image_size})};
}

}  // namespace lockstep
