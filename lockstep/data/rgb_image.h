#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// A decoded image: [height, width, 3] in memory, red, green, blue.
struct RgbImage {
  int64_t height = 0;
  int64_t width = 0;
  std::vector<uint8_t> pixels;

  /// Makes room. Throws DataError naming `name` for an image of no pixels, or of so many that it is
  /// rather an attack than a picture.
  void resize(int64_t new_height, int64_t new_width, const std::string& name);
};

/// Decodes a JPEG or PNG file, whatever its extension, to what Pillow's
/// Image.open(path).convert("RGB") gives: grey becomes colour, CMYK too, transparency and
/// orientation are left out. Throws DataError for a file that is damaged, cut short, or another
/// format.
RgbImage read_image(const std::filesystem::path& path);

/// Whether the extension is one that read_image may know: .jpg, .jpeg, .png.
bool is_image_name(const std::filesystem::path& path);

/// The two formats, from a file's content. `name` is for messages.
RgbImage decode_jpeg(std::string_view bytes, const std::string& name);
RgbImage decode_png(std::string_view bytes, const std::string& name);

}  // namespace lockstep
