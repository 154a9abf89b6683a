#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace lockstep {

/// Decodes a JPEG or PNG file, whatever its extension, to what Pillow's
/// Image.open(path).convert("RGB") gives: uint8 [height, width, 3]. Grey becomes colour, CMYK too,
/// transparency and orientation are left out. Throws DataError for a file that is damaged, cut
/// short, or another format.
at::Tensor read_image(const std::filesystem::path& path);

/// Whether the extension is one that read_image may know: .jpg, .jpeg, .png.
bool is_image_name(const std::filesystem::path& path);

/// The two formats, from a file's content. `name` is for messages.
at::Tensor decode_jpeg(std::string_view bytes, const std::string& name);
at::Tensor decode_png(std::string_view bytes, const std::string& name);

/// Room for an image. Throws DataError naming `name` for one of no pixels, or of so many that it is
/// rather an attack than a picture.
at::Tensor empty_image(int64_t height, int64_t width, const std::string& name);

}  // namespace lockstep
