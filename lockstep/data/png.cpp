#include <png.h>

#include <algorithm>
#include <csetjmp>
#include <cstring>
#include <memory>

#include "lockstep/base/error.h"
#include "lockstep/data/rgb_image.h"

namespace lockstep {
namespace {

/// libpng ends a failed call by a jump, which no C++ object of the frames between may see.
struct Reading {
  std::string_view left;
  char message[256] = {};
};

void on_error(png_structp decoder, png_const_charp message) {
  auto* reading = static_cast<Reading*>(png_get_error_ptr(decoder));
  std::strncpy(reading->message, message, sizeof reading->message - 1);
  png_longjmp(decoder, 1);
}

void on_warning(png_structp, png_const_charp) {}

void read_bytes(png_structp decoder, png_bytep to, size_t size) {
  auto* reading = static_cast<Reading*>(png_get_io_ptr(decoder));
  if (reading->left.size() < size) png_error(decoder, "the file is cut short");
  std::memcpy(to, reading->left.data(), size);
  reading->left.remove_prefix(size);
}

/// What is over 255 is white: Pillow does not scale grey of 16 bits.
void clip_to_bytes(png_structp, png_row_infop row, png_bytep data) {
  for (size_t i = 0; i < row->rowbytes / 2; ++i) {
    data[i] = data[2 * i] != 0 ? 255 : data[2 * i + 1];
  }
}

/// 8 bits of red, green and blue, whatever the file has.
void ask_for_rgb(png_structp decoder, png_infop info) {
  const bool is_deep_grey = png_get_bit_depth(decoder, info) == 16 &&
                            png_get_color_type(decoder, info) == PNG_COLOR_TYPE_GRAY;
  if (is_deep_grey) {
    png_set_read_user_transform_fn(decoder, clip_to_bytes);
    png_set_user_transform_info(decoder, nullptr, 8, 3);
  } else {
    png_set_strip_16(decoder);
  }
  png_set_expand(decoder);
  png_set_gray_to_rgb(decoder);
  png_set_strip_alpha(decoder);
}

/// Everything between two jumps. What it makes belongs to the caller.
bool decode(png_structp decoder, png_infop info, const std::string& name, at::Tensor& image,
            std::vector<png_bytep>& rows) {
  if (setjmp(png_jmpbuf(decoder)) != 0) return false;
  png_read_info(decoder, info);
  ask_for_rgb(decoder, info);
  png_set_interlace_handling(decoder);
  png_read_update_info(decoder, info);
  const size_t height = png_get_image_height(decoder, info);
  const size_t row = 3 * size_t{png_get_image_width(decoder, info)};
  image = empty_image(static_cast<int64_t>(height), static_cast<int64_t>(row / 3), name);
  if (png_get_rowbytes(decoder, info) != row) {
    png_error(decoder, "rows of another size than three bytes a pixel");
  }
  auto* to = image.mutable_data_ptr<uint8_t>();
  for (size_t y = 0; y < height; ++y, to += row) rows.push_back(to);
  png_read_image(decoder, rows.data());
  png_read_end(decoder, nullptr);
  return true;
}

}  // namespace

at::Tensor decode_png(std::string_view bytes, const std::string& name) {
  Reading reading{bytes};
  png_structp decoder =
      png_create_read_struct(PNG_LIBPNG_VER_STRING, &reading, on_error, on_warning);
  png_infop info = decoder ? png_create_info_struct(decoder) : nullptr;
  const std::shared_ptr<void> end(
      nullptr, [&](void*) { png_destroy_read_struct(&decoder, &info, nullptr); });
  at::Tensor image;
  std::vector<png_bytep> rows;
  if (info) png_set_read_fn(decoder, &reading, read_bytes);
  const bool done = info && decode(decoder, info, name, image, rows);
  if (!done) throw DataError(name + ": the PNG is damaged: " + reading.message);
  return image;
}

}  // namespace lockstep
