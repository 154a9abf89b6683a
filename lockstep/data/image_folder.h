#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/data/dataset.h"

namespace lockstep {

/// What to do with an image that cannot be read.
enum class OnBadImage {
  stop,  ///< An error that names it.
  skip,  ///< The next image of the list, with its class, takes its place. A warning names it.
};

struct ImageFolderOptions {
  /// The shorter side after scaling. 256: torchvision's recipe for crops of 224.
  int64_t resize = 256;
  /// Height and width of what is cut out of the middle; at most `resize`.
  int64_t crop = 224;
  OnBadImage on_bad_image = OnBadImage::stop;  ///< As with torchvision's ImageFolder.
};

/// The images of torchvision's ImageFolder: one folder a class, classes by their names in order, in
/// each all .jpg, .jpeg and .png files below it, by folder and name. Other files are left out, with
/// a warning for those that are images too, and for links that lead nowhere.
struct ImageList {
  std::string name;
  std::vector<std::string> classes;
  std::vector<std::pair<std::filesystem::path, int64_t>> images;  ///< With the class.
};

/// Throws DataError for a folder that is missing or has no class, for a class without images, and
/// for a link to a folder that it lies in. Throws SystemError for a folder that cannot be read.
ImageList list_images(const std::filesystem::path& folder);

/// Looks at image `first` and each `stride`-th after it, as one of `stride` ranks does. A file that
/// begins and ends as a JPEG or PNG does is taken for whole, any other one is decoded. Throws
/// DataError naming those that cannot be read.
void check_images(const ImageList& list, size_t first = 0, size_t stride = 1);

/// A source that decodes an image when it is asked for: uint8 [3, crop, crop], and the class. It is
/// torchvision's Resize(resize) with antialias, bilinear, and CenterCrop(crop), as for tensors.
/// `read` throws DataError naming a file that is damaged, and SystemError for one that cannot be
/// read; with OnBadImage::skip only where that many follow each other that more is wrong. Throws
/// UsageError for sizes that do not fit.
std::unique_ptr<SampleSource> image_source(ImageList list, const ImageFolderOptions& options);

/// How a folder's images are checked.
struct ImageChecks {
  OnBadImage on_bad_image = OnBadImage::stop;  ///< With `stop` check_images is called, too.
  size_t first = 0;                            ///< Its share: of rank `first`,
  size_t stride = 1;                           ///< of so many.
};

/// open_dataset's "folder:PATH". See there.
DatasetSources open_image_folder(const std::filesystem::path& path, const DatasetOptions& options,
                                 const ImageChecks& checks = {});

}  // namespace lockstep
