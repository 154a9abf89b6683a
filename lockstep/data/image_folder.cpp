#include "lockstep/data/image_folder.h"

#include <ATen/ops/_upsample_bilinear2d_aa.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
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
  static const std::set<std::string> known{".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"};
  return known.contains(to_lower(path.extension().string()));
}

/// A walk through it would not end, and would give images of the outer folder the inner one's
/// class.
void refuse_loop(const fs::path& link) {
  const fs::path target = fs::canonical(link);
  for (fs::path outer = fs::absolute(link); outer.has_relative_path();) {
    outer = outer.parent_path();
    const fs::path real = fs::canonical(outer);
    if (std::mismatch(target.begin(), target.end(), real.begin(), real.end()).first == target.end())
      throw DataError(link.string() + " is a link to " + target.string() + ", which it lies in",
                      "take the link away");
  }
}

/// What is left out of a list.
struct LeftOut {
  int64_t foreign = 0;
  std::vector<fs::path> dangling;  ///< Links that lead nowhere.
};

/// Whether the entry is a folder, links followed.
bool is_folder(const fs::directory_entry& entry, LeftOut& left_out) {
  std::error_code ignored;
  const fs::file_status status = entry.status(ignored);
  if (entry.is_symlink() && fs::is_directory(status)) refuse_loop(entry.path());
  if (entry.is_symlink() && !fs::exists(status)) left_out.dangling.push_back(entry.path());
  return fs::is_directory(status);
}

/// Images with the folders that they lie in.
using ByFolder = std::vector<std::pair<std::string, fs::path>>;

void add_images_below(const fs::path& folder, ByFolder& images, LeftOut& left_out) {
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    std::error_code ignored;
    if (is_folder(entry, left_out)) {
      add_images_below(entry.path(), images, left_out);
    } else if (entry.is_regular_file(ignored)) {
      left_out.foreign += is_foreign_image(entry.path());
      if (is_image_name(entry.path())) images.emplace_back(folder.string(), entry.path());
    }
  }
}

/// Whether the file begins and ends as a JPEG or PNG does.
bool looks_whole(const fs::path& path) {
  constexpr std::string_view kPngEnd("\0\0\0\0IEND\xAE\x42\x60\x82", 12);
  char begin[4] = {}, end[kPngEnd.size()] = {};
  std::ifstream file(path, std::ios::binary);
  file.read(begin, sizeof begin);
  file.seekg(-static_cast<std::streamoff>(sizeof end), std::ios::end);
  if (!file.read(end, sizeof end)) return false;
  const std::string_view first(begin, sizeof begin), last(end, sizeof end);
  if (first.starts_with("\xFF\xD8\xFF")) return last.ends_with("\xFF\xD9");
  return first == "\x89PNG" && last == kPngEnd;
}

std::string without_hint(const Error& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
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
      auto index = static_cast<size_t>(indices[i]);
      data.select(0, static_cast<int64_t>(i)).copy_(readable(index));
      classes[i] = list_->images.at(index).second;
    }
  }

 private:
  /// Of the first image from `index` on that can be read.
  at::Tensor readable(size_t& index) const {
    constexpr size_t kMostTries = 100;  // A whole disk that has gone is not skipped.
    for (size_t tries = 1;; ++tries) {
      try {
        return cropped(list_->images.at(index).first);
      } catch (const Error& error) {
        if (options_.on_bad_image == OnBadImage::stop ||
            tries == std::min(kMostTries, list_->images.size()))
          throw;
        const std::lock_guard lock(told_->mutex);
        if (told_->images.insert(index).second)
          log_warning("skipped, another image takes its place: " + without_hint(error));
        index = (index + 1) % list_->images.size();
      }
    }
  }

  /// [3, crop, crop], a view of a larger image.
  at::Tensor cropped(const fs::path& path) const {
    const at::Tensor image = read_image(path);
    const int64_t height = image.size(0), width = image.size(1);
    at::Tensor pixels = image.unsqueeze(0).permute({0, 3, 1, 2});
    const int64_t shorter = std::min(height, width), longer = std::max(height, width);
    const int64_t other = options_.resize * longer / shorter;
    const int64_t to_height = height <= width ? options_.resize : other;
    const int64_t to_width = height <= width ? other : options_.resize;
    if (to_height != height || to_width != width)
      pixels = at::_upsample_bilinear2d_aa(pixels, {to_height, to_width}, /*align_corners=*/false);
    const int64_t top = rounded_half(to_height - options_.crop);
    const int64_t left = rounded_half(to_width - options_.crop);
    return pixels[0].narrow(1, top, options_.crop).narrow(2, left, options_.crop);
  }

  /// The images that a warning has named, by any clone.
  struct Told {
    std::mutex mutex;
    std::set<size_t> images;
  };

  std::shared_ptr<const ImageList> list_;
  ImageFolderOptions options_;
  std::shared_ptr<Told> told_ = std::make_shared<Told>();
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

ImageList list_classes(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored)) {
    throw DataError(folder.string() + ": there is no such folder",
                    "folder: takes a folder with a folder of images for each class");
  }
  ImageList list;
  list.name = "folder:" + folder.string();
  LeftOut left_out;
  std::set<fs::path> classes;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (is_folder(entry, left_out)) classes.insert(entry.path());
  }
  for (const fs::path& path : classes) {
    ByFolder images;
    add_images_below(path, images, left_out);
    if (images.empty()) {
      throw DataError(path.string() + ": this class has no image; expected .jpg, .jpeg or .png",
                      left_out.dangling.empty()
                          ? "take the folder away, or put images into it"
                          : left_out.dangling.back().string() + " is a link that leads nowhere");
    }
    const auto label = static_cast<int64_t>(list.classes.size());
    // As os.walk sorted: folders by path, in each the images by name.
    std::sort(images.begin(), images.end());
    for (const auto& [in, image] : images) list.images.emplace_back(image, label);
    list.classes.push_back(path.filename().string());
  }
  if (list.classes.empty()) {
    throw DataError(folder.string() + " has no folders; expected one for each class",
                    "put the images of a class into a folder with the class's name");
  }
  if (left_out.foreign > 0) {
    log_warning(folder.string() + ": " + counted(left_out.foreign, "image") +
                " of other formats than JPEG and PNG left out");
  }
  if (const auto& dangling = left_out.dangling; !dangling.empty()) {
    log_warning(folder.string() + ": " + counted(static_cast<int64_t>(dangling.size()), "link") +
                " left out because they lead nowhere, such as " + dangling.front().string());
  }
  return list;
}

}  // namespace

ImageList list_images(const fs::path& folder) {
  try {
    return list_classes(folder);
  } catch (const fs::filesystem_error& error) {
    const fs::path& path = error.path1().empty() ? folder : error.path1();
    throw SystemError("cannot read the folder " + path.string(), error.code().value());
  }
}

void check_images(const ImageList& list, size_t first, size_t stride) {
  constexpr size_t kNamed = 5;
  std::vector<std::string> problems;
  size_t count = 0;
  for (size_t i = first; i < list.images.size(); i += stride) {
    const fs::path& path = list.images[i].first;
    if (looks_whole(path)) continue;
    try {
      read_image(path);
    } catch (const Error& error) {
      if (++count <= kNamed) problems.push_back(without_hint(error));
    }
  }
  if (count == 0) return;
  if (count > kNamed) problems.push_back("...");
  throw DataError(list.name + ": " + counted(static_cast<int64_t>(count), "image") +
                      " cannot be read: " + join(problems, "; "),
                  "take such files out of the folder, or give --on-bad-image skip "
                  "(OnBadImage::skip in a program)");
}

std::unique_ptr<SampleSource> image_source(ImageList list, const ImageFolderOptions& options) {
  return std::make_unique<ImageSource>(std::make_shared<const ImageList>(std::move(list)), options);
}

DatasetSources open_image_folder(const fs::path& path, const DatasetOptions& options,
                                 const ImageChecks& checks) {
  // 256 for 224, as the recipes for ImageNet have it.
  const int64_t resize = options.image_size * 8 / 7;
  const int64_t train_size =
      options.train_image_size > 0 ? options.train_image_size : options.image_size;
  const fs::path train_folder = part_of(path, {"train"});
  ImageList train, test;
  if (train_folder.empty()) {
    std::tie(train, test) = split(list_images(path), test_fraction_of(options));
  } else if (const fs::path test_folder = part_of(path, {"val", "test"}); test_folder.empty()) {
    std::tie(train, test) = split(list_images(train_folder), test_fraction_of(options));
  } else {
    expect_no_test_fraction("folder:" + path.string(), options);
    train = list_images(train_folder);
    test = list_images(test_folder);
    if (train.classes != test.classes) {
      throw DataError(test_folder.string() + " has the classes " + join(test.classes, ", ") +
                          ", but " + train_folder.string() + " has " + join(train.classes, ", "),
                      "both parts need the same folders");
    }
  }
  train.name = test.name = "folder:" + path.string();
  if (checks.on_bad_image == OnBadImage::stop) {
    check_images(train, checks.first, checks.stride);
    check_images(test, checks.first, checks.stride);
  }
  ImageFolderOptions images{.resize = resize, .crop = train_size};
  images.on_bad_image = checks.on_bad_image;
  auto train_source = image_source(std::move(train), images);
  images.crop = options.image_size;
  return {std::move(train_source), image_source(std::move(test), images)};
}

}  // namespace lockstep
