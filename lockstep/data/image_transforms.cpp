#include <ATen/ops/full.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/base/random.h"
#include "lockstep/data/transforms.h"

namespace lockstep {
namespace {

struct ImageSize {
  int64_t channels;
  int64_t height;
  int64_t width;
};

[[noreturn]] void refuse(const Transform& transform, const SampleSpec& input,
                         const std::string& expected) {
  throw UsageError(transform.name() + " got samples of " + input.describe() + ", expected " +
                   expected);
}

ImageSize image_size(const Transform& transform, const SampleSpec& input) {
  const auto& shape = input.shape;
  if (shape.size() == 2) return {1, shape[0], shape[1]};
  if (shape.size() == 3) return {shape[0], shape[1], shape[2]};
  refuse(transform, input, "images [H, W] or [C, H, W]");
}

/// One value of a dtype, as bytes.
struct Pixel {
  std::array<std::byte, 16> bytes{};
  size_t size = 0;
};

Pixel make_pixel(double value, at::ScalarType dtype) {
  const at::Tensor scalar = at::full({}, value, dtype);
  Pixel pixel;
  pixel.size = scalar.nbytes();
  std::memcpy(pixel.bytes.data(), scalar.const_data_ptr(), pixel.size);
  return pixel;
}

void fill_pixels(std::byte* to, int64_t count, const Pixel& pixel) {
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(to + i * pixel.size, pixel.bytes.data(), pixel.size);
}

class RandomCrop : public Transform {
 public:
  explicit RandomCrop(RandomCropOptions options) : options_(options) {
    if (options_.height < 0 || options_.width < 0 || options_.padding < 0)
      throw UsageError("random_crop got a size of " + std::to_string(options_.height) + " x " +
                       std::to_string(options_.width) + " and a padding of " +
                       std::to_string(options_.padding) + ", expected none below 0");
  }
  std::string name() const override { return "random_crop"; }

  SampleSpec output(const SampleSpec& input) const override {
    const ImageSize image = image_size(*this, input);
    const ImageSize crop = crop_size(image);
    if (crop.height > image.height + 2 * options_.padding ||
        crop.width > image.width + 2 * options_.padding)
      refuse(*this, input,
             "images that with a padding of " + std::to_string(options_.padding) +
                 " are at least " + std::to_string(crop.height) + " x " +
                 std::to_string(crop.width));
    SampleSpec result = input;
    result.shape.end()[-2] = crop.height;
    result.shape.end()[-1] = crop.width;
    return result;
  }

  void apply(const RowView& rows, const SampleSpec& input, const at::Tensor& out,
             const TransformContext& context) const override {
    const ImageSize image = image_size(*this, input);
    const ImageSize crop = crop_size(image);
    const Pixel fill = make_pixel(options_.fill, input.dtype);
    auto* to = static_cast<std::byte*>(out.mutable_data_ptr());
    const auto crop_bytes = static_cast<int64_t>(crop.height * crop.width * fill.size);
    for (int64_t i = 0; i < rows.size(); ++i) {
      KeyedRandom random(context.seed, context.epoch, context.indices[i]);
      const int64_t top = position(random, image.height, crop.height);
      const int64_t left = position(random, image.width, crop.width);
      const std::byte* from = rows[i];
      for (int64_t c = 0; c < image.channels; ++c, to += crop_bytes)
        copy_plane(from + c * image.height * image.width * fill.size, image, to, crop, top, left,
                   fill);
    }
  }

 private:
  ImageSize crop_size(const ImageSize& image) const {
    return {image.channels, options_.height ? options_.height : image.height,
            options_.width ? options_.width : image.width};
  }
  /// Where the crop starts in the image; below 0 is in the padding.
  int64_t position(KeyedRandom& random, int64_t image, int64_t crop) const {
    const int64_t positions = image + 2 * options_.padding - crop + 1;
    return static_cast<int64_t>(random.below(positions)) - options_.padding;
  }
  static void copy_plane(const std::byte* from, const ImageSize& image, std::byte* to,
                         const ImageSize& crop, int64_t top, int64_t left, const Pixel& fill) {
    const auto size = static_cast<int64_t>(fill.size);
    const int64_t first = std::clamp<int64_t>(-left, 0, crop.width);
    const int64_t last = std::clamp<int64_t>(image.width - left, first, crop.width);
    for (int64_t y = 0; y < crop.height; ++y, to += crop.width * size) {
      const int64_t source_y = y + top;
      if (source_y < 0 || source_y >= image.height) {
        fill_pixels(to, crop.width, fill);
        continue;
      }
      fill_pixels(to, first, fill);
      std::memcpy(to + first * size, from + (source_y * image.width + left + first) * size,
                  (last - first) * size);
      fill_pixels(to + last * size, crop.width - last, fill);
    }
  }

  RandomCropOptions options_;
};

class RandomHorizontalFlip : public Transform {
 public:
  explicit RandomHorizontalFlip(double p) : p_(p) {
    if (!(p >= 0 && p <= 1))
      throw UsageError("random_horizontal_flip got the probability " + std::to_string(p) +
                       ", expected one from 0 to 1");
  }
  std::string name() const override { return "random_horizontal_flip"; }
  SampleSpec output(const SampleSpec& input) const override {
    image_size(*this, input);
    return input;
  }

  void apply(const RowView& rows, const SampleSpec& input, const at::Tensor& out,
             const TransformContext& context) const override {
    auto* to = static_cast<std::byte*>(out.mutable_data_ptr());
    const int64_t width = input.shape.back();
    const int64_t lines = input.numel() / std::max<int64_t>(width, 1);
    for (int64_t i = 0; i < rows.size(); ++i, to += rows.row_bytes()) {
      KeyedRandom random(context.seed, context.epoch, context.indices[i]);
      if (random.uniform() < p_)
        mirror(rows[i], to, lines, width, rows.row_bytes() / input.numel());
      else
        std::memcpy(to, rows[i], rows.row_bytes());
    }
  }

 private:
  static void mirror(const std::byte* from, std::byte* to, int64_t lines, int64_t width,
                     int64_t size) {
    switch (size) {
      case 1:
        return mirror_as<uint8_t>(from, to, lines, width);
      case 4:
        return mirror_as<uint32_t>(from, to, lines, width);
      default:
        for (int64_t y = 0; y < lines; ++y) {
          for (int64_t x = 0; x < width; ++x)
            std::memcpy(to + (y * width + width - 1 - x) * size, from + (y * width + x) * size,
                        size);
        }
    }
  }
  template <typename T>
  static void mirror_as(const std::byte* from, std::byte* to, int64_t lines, int64_t width) {
    const auto* source = reinterpret_cast<const T*>(from);
    auto* target = reinterpret_cast<T*>(to);
    for (int64_t y = 0; y < lines; ++y)
      std::reverse_copy(source + y * width, source + (y + 1) * width, target + y * width);
  }

  double p_;
};

}  // namespace

TransformPtr random_crop(RandomCropOptions options) {
  return std::make_shared<RandomCrop>(options);
}

TransformPtr random_horizontal_flip(double p) {
  return std::make_shared<RandomHorizontalFlip>(p);
}

}  // namespace lockstep
