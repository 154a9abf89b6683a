#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/data/dataset.h"

namespace lockstep {

struct ImageFolderOptions {
  /// The shorter side after scaling. 256: torchvision's recipe for crops of 224.
  int64_t resize = 256;
  /// Height and width of what is cut out of the middle; at most `resize`.
  int64_t crop = 224;
};

/// The images of torchvision's ImageFolder: one folder a class, classes by their names in order, in
/// each all .jpg, .jpeg and .png files below it, by folder and name. Other files are left out, with
/// a warning for those that are images too.
struct ImageList {
  std::string name;
  std::vector<std::string> classes;
  std::vector<std::pair<std::filesystem::path, int64_t>> images;  ///< With the class.
};

/// Throws DataError for a folder that is missing or has no class, and for a class without images.
ImageList list_images(const std::filesystem::path& folder);

/// A source that decodes an image when it is asked for: uint8 [3, crop, crop], and the class. It is
/// torchvision's Resize(resize) with antialias, bilinear, and CenterCrop(crop), as for tensors.
/// `read` throws DataError naming a file that is damaged. Throws UsageError for sizes that do not
/// fit.
std::unique_ptr<SampleSource> image_source(ImageList list, const ImageFolderOptions& options);

/// open_dataset's "folder:PATH". See there.
DatasetSources open_image_folder(const std::filesystem::path& path, const DatasetOptions& options);

}  // namespace lockstep
