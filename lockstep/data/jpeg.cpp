#include <cstdio>  // jpeglib.h needs it

#include <jpeglib.h>

#include <jerror.h>

#include <algorithm>
#include <csetjmp>
#include <memory>

#include "lockstep/base/error.h"
#include "lockstep/data/rgb_image.h"

namespace lockstep {
namespace {

/// libjpeg ends a failed call by a jump, which no C++ object of the frames between may see.
struct Errors {
  jpeg_error_mgr base;
  std::jmp_buf jump;
  char message[JMSG_LENGTH_MAX] = {};
};

void on_error(j_common_ptr decoder) {
  auto* errors = reinterpret_cast<Errors*>(decoder->err);
  decoder->err->format_message(decoder, errors->message);
  std::longjmp(errors->jump, 1);
}

/// A file that is cut short would be filled up with grey. Other warnings do not spoil the image.
void on_message(j_common_ptr decoder, int level) {
  const int code = decoder->err->msg_code;
  if (level < 0 && (code == JWRN_JPEG_EOF || code == JWRN_HIT_MARKER)) on_error(decoder);
}

/// Ink to light, as Pillow has it: (255 - ink) * (255 - black) / 255, rounded. Adobe's programs
/// store 255 - ink, and all that write such files follow them.
void from_cmyk(const std::vector<uint8_t>& row, uint8_t* to, int64_t width) {
  for (int64_t x = 0; x < width; ++x) {
    const int black = row[4 * x + 3];
    for (int64_t c = 0; c < 3; ++c) {
      const int product = (255 - row[4 * x + c]) * black + 128;
      *to++ = static_cast<uint8_t>(std::clamp(black - (((product >> 8) + product) >> 8), 0, 255));
    }
  }
}

/// Everything between two jumps. What it makes belongs to the caller.
bool decode(jpeg_decompress_struct& decoder, Errors& errors, std::string_view bytes,
            const std::string& name, at::Tensor& image, std::vector<uint8_t>& row) {
  if (setjmp(errors.jump) != 0) return false;
  jpeg_create_decompress(&decoder);
  jpeg_mem_src(&decoder, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
  jpeg_read_header(&decoder, TRUE);
  const bool inks = decoder.jpeg_color_space == JCS_CMYK || decoder.jpeg_color_space == JCS_YCCK;
  decoder.out_color_space = inks ? JCS_CMYK : JCS_RGB;
  jpeg_start_decompress(&decoder);
  image = empty_image(decoder.output_height, decoder.output_width, name);
  const int64_t width = decoder.output_width;
  auto* to = image.mutable_data_ptr<uint8_t>();
  row.resize(inks ? 4 * static_cast<size_t>(width) : 0);
  while (decoder.output_scanline < decoder.output_height) {
    JSAMPROW line = inks ? row.data() : to;
    jpeg_read_scanlines(&decoder, &line, 1);
    if (inks) from_cmyk(row, to, width);
    to += 3 * width;
  }
  jpeg_finish_decompress(&decoder);
  return true;
}

}  // namespace

at::Tensor decode_jpeg(std::string_view bytes, const std::string& name) {
  jpeg_decompress_struct decoder{};
  const std::shared_ptr<void> end(nullptr, [&](void*) { jpeg_destroy_decompress(&decoder); });
  Errors errors;
  decoder.err = jpeg_std_error(&errors.base);
  errors.base.error_exit = on_error;
  errors.base.emit_message = on_message;
  at::Tensor image;
  std::vector<uint8_t> row;
  const bool done = decode(decoder, errors, bytes, name, image, row);
  if (!done) throw DataError(name + ": the JPEG is damaged: " + errors.message);
  return image;
}

}  // namespace lockstep
