#include "lockstep/data/rgb_image.h"

#include <ATen/ops/empty.h>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"

namespace lockstep {

at::Tensor empty_image(int64_t height, int64_t width, const std::string& name) {
  constexpr int64_t kMostPixels = int64_t{1} << 28;
  if (height < 1 || width < 1 || height > kMostPixels / width) {
    throw DataError(name + ": an image of " + std::to_string(width) + " x " +
                    std::to_string(height) + " pixels; expected 1 to 268,435,456 of them");
  }
  return at::empty({height, width, 3}, at::kByte);
}

at::Tensor read_image(const std::filesystem::path& path) {
  constexpr size_t kMostBytes = size_t{1} << 30;
  const std::string bytes = read_file(path, kMostBytes);
  if (bytes.starts_with("\xFF\xD8\xFF")) return decode_jpeg(bytes, path.string());
  if (bytes.starts_with("\x89PNG\r\n\x1A\n")) return decode_png(bytes, path.string());
  throw DataError(path.string() + ", byte 0: " +
                      (bytes.empty() ? "the file is empty" : "this is neither JPEG nor PNG"),
                  "convert the image, or take it out of the folder");
}

bool is_image_name(const std::filesystem::path& path) {
  const std::string extension = to_lower(path.extension().string());
  return extension == ".jpg" || extension == ".jpeg" || extension == ".png";
}

}  // namespace lockstep
