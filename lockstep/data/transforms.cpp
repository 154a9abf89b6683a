#include "lockstep/data/transforms.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numbers>
#include <numeric>

#include "lockstep/base/error.h"
#include "lockstep/base/random.h"
#include "lockstep/data/transform_runner.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse(const Transform& transform, const SampleSpec& input,
                         const std::string& expected) {
  throw UsageError(transform.name() + " got samples of " + input.describe() + ", expected " +
                   expected);
}

using Table = std::array<float, 256>;

/// The float of each byte value, by the very operations that torchvision's ToTensor and Normalize
/// apply to a tensor, so that looking it up gives their bits.
Table make_table(bool normalized, double mean, double std) {
  at::Tensor values = at::arange(256, at::kByte).to(at::kFloat).div(255);
  if (normalized) values.sub_(at::tensor(mean, at::kFloat)).div_(at::tensor(std, at::kFloat));
  Table table;
  std::copy_n(values.const_data_ptr<float>(), table.size(), table.begin());
  return table;
}

/// The next row's bytes are asked for while this one is converted: rows of a shuffled batch lie far
/// apart, where the processor does not foresee them. Inlined always: GCC takes a function that only
/// prefetches for one without an effect and drops the call.
[[gnu::always_inline]] inline void prefetch_row(const RowView& rows, int64_t i) {
  constexpr int64_t kCacheLine = 64;
  if (i >= rows.size()) return;
  for (int64_t at = 0; at < rows.row_bytes(); at += kCacheLine) __builtin_prefetch(rows[i] + at);
}

void look_up(const Table& table, const uint8_t* __restrict from, float* __restrict to,
             int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int64_t k = 0; k < 8; ++k) to[i + k] = table[from[i + k]];
  }
  for (; i < count; ++i) to[i] = table[from[i]];
}

void normalize_floats(const float* __restrict from, float* __restrict to, int64_t count, float mean,
                      float std) {
  for (int64_t i = 0; i < count; ++i) to[i] = (from[i] - mean) / std;
}

/// ToTensor and Normalize; with no mean and std, ToTensor alone.
class ToFloat : public Transform {
 public:
  ToFloat() : tables_{make_table(false, 0, 1)} {}
  ToFloat(std::vector<double> mean, std::vector<double> std)
      : mean_(std::move(mean)), std_(std::move(std)) {
    if (mean_.empty() || mean_.size() != std_.size())
      throw UsageError("normalize got " + std::to_string(mean_.size()) + " means and " +
                       std::to_string(std_.size()) + " standard deviations, expected as many of " +
                       "both: one, or one a channel");
    for (size_t c = 0; c < std_.size(); ++c) {
      if (!std::isfinite(mean_[c]) || !std::isfinite(std_[c]) || static_cast<float>(std_[c]) == 0)
        throw UsageError("normalize got mean " + std::to_string(mean_[c]) + " and std " +
                         std::to_string(std_[c]) +
                         ", expected finite numbers and a std other than 0");
      tables_.push_back(make_table(true, mean_[c], std_[c]));
    }
  }

  std::string name() const override { return normalizes() ? "normalize" : "to_float"; }

  SampleSpec output(const SampleSpec& input) const override {
    const size_t dims = input.shape.size();
    SampleSpec result{input.shape, at::kFloat};
    if (input.dtype == at::kByte) {
      if (dims != 2 && dims != 3) refuse(*this, input, "uint8 images [H, W] or [C, H, W]");
      if (dims == 2) result.shape.insert(result.shape.begin(), 1);
    } else if (input.dtype != at::kFloat) {
      refuse(*this, input, "uint8 or float32");
    }
    if (mean_.size() > 1 && (result.shape.empty() || result.shape[0] != int64_t(mean_.size())))
      refuse(*this, input, std::to_string(mean_.size()) + " channels, one for each mean");
    return result;
  }

  void apply(const RowView& rows, const SampleSpec& input, const at::Tensor& out,
             const TransformContext&) const override {
    auto* to = out.mutable_data_ptr<float>();
    const int64_t parts = static_cast<int64_t>(tables_.size());
    const int64_t plane = input.numel() / parts;
    for (int64_t i = 0; i < rows.size(); ++i) {
      prefetch_row(rows, i + 1);
      for (int64_t c = 0; c < parts; ++c, to += plane) {
        if (input.dtype == at::kByte)
          look_up(tables_[c], reinterpret_cast<const uint8_t*>(rows[i]) + c * plane, to, plane);
        else
          convert(c, reinterpret_cast<const float*>(rows[i]) + c * plane, to, plane);
      }
    }
  }

 private:
  bool normalizes() const { return !mean_.empty(); }
  void convert(int64_t channel, const float* from, float* to, int64_t count) const {
    if (normalizes())
      normalize_floats(from, to, count, static_cast<float>(mean_[channel]),
                       static_cast<float>(std_[channel]));
    else
      std::copy_n(from, count, to);
  }

  std::vector<double> mean_;
  std::vector<double> std_;
  std::vector<Table> tables_;  ///< One a mean.
};

struct ImageSize {
  int64_t channels;
  int64_t height;
  int64_t width;
};

ImageSize image_size(const Transform& transform, const SampleSpec& input) {
  const auto& shape = input.shape;
  if (shape.size() == 2) return {1, shape[0], shape[1]};
  if (shape.size() == 3) return {shape[0], shape[1], shape[2]};
  refuse(transform, input, "images [H, W] or [C, H, W]");
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
    const at::Tensor fill = at::full({crop.width}, options_.fill, input.dtype);
    const int64_t size = fill.element_size();
    auto* to = static_cast<std::byte*>(out.mutable_data_ptr());
    const int64_t crop_bytes = crop.height * crop.width * size;
    for (int64_t i = 0; i < rows.size(); ++i) {
      KeyedRandom random(context.seed, context.epoch, context.indices[i]);
      const int64_t top = position(random, image.height, crop.height);
      const int64_t left = position(random, image.width, crop.width);
      const std::byte* from = rows[i];
      for (int64_t c = 0; c < image.channels; ++c, to += crop_bytes)
        copy_plane(from + c * image.height * image.width * size, image, to, crop, top, left,
                   static_cast<const std::byte*>(fill.const_data_ptr()), size);
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
  /// `fill` is a row of the crop, `size` the bytes of a pixel.
  static void copy_plane(const std::byte* from, const ImageSize& image, std::byte* to,
                         const ImageSize& crop, int64_t top, int64_t left, const std::byte* fill,
                         int64_t size) {
    const int64_t first = std::clamp<int64_t>(-left, 0, crop.width);
    const int64_t last = std::clamp<int64_t>(image.width - left, first, crop.width);
    for (int64_t y = 0; y < crop.height; ++y, to += crop.width * size) {
      const int64_t source_y = y + top;
      if (source_y < 0 || source_y >= image.height) {
        std::memcpy(to, fill, crop.width * size);
        continue;
      }
      std::memcpy(to, fill, first * size);
      std::memcpy(to + first * size, from + (source_y * image.width + left + first) * size,
                  (last - first) * size);
      std::memcpy(to + last * size, fill, (crop.width - last) * size);
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

class RandomRotation : public Transform {
 public:
  explicit RandomRotation(RandomRotationOptions options) : options_(options) {
    if (!std::isfinite(options_.degrees) || options_.degrees < 0)
      throw UsageError("random_rotation got " + std::to_string(options_.degrees) +
                       " degrees, expected a number that is not below 0");
  }
  std::string name() const override { return "random_rotation"; }
  SampleSpec output(const SampleSpec& input) const override {
    image_size(*this, input);
    if (input.dtype != at::kByte && input.dtype != at::kFloat)
      refuse(*this, input, "uint8 or float32");
    return input;
  }

  void apply(const RowView& rows, const SampleSpec& input, const at::Tensor& out,
             const TransformContext& context) const override {
    if (input.dtype == at::kByte)
      apply_as<uint8_t>(rows, input, out.mutable_data_ptr<uint8_t>(), context);
    else
      apply_as<float>(rows, input, out.mutable_data_ptr<float>(), context);
  }

 private:
  template <typename T>
  void apply_as(const RowView& rows, const SampleSpec& input, T* to,
                const TransformContext& context) const {
    const ImageSize image = image_size(*this, input);
    const int64_t plane = image.height * image.width;
    for (int64_t i = 0; i < rows.size(); ++i) {
      KeyedRandom random(context.seed, context.epoch, context.indices[i]);
      const double angle =
          random.uniform(-options_.degrees, options_.degrees) * std::numbers::pi / 180;
      const auto* from = reinterpret_cast<const T*>(rows[i]);
      for (int64_t c = 0; c < image.channels; ++c, to += plane)
        rotate(from + c * plane, to, image, static_cast<float>(std::cos(angle)),
               static_cast<float>(std::sin(angle)));
    }
  }

  /// For each pixel of the result, the pixel that lies there before the turn.
  template <typename T>
  void rotate(const T* from, T* to, const ImageSize& image, float cosine, float sine) const {
    const float centre_x = 0.5F * static_cast<float>(image.width - 1);
    const float centre_y = 0.5F * static_cast<float>(image.height - 1);
    for (int64_t y = 0; y < image.height; ++y) {
      const float dy = static_cast<float>(y) - centre_y;
      for (int64_t x = 0; x < image.width; ++x) {
        const float dx = static_cast<float>(x) - centre_x;
        const float source_x = cosine * dx - sine * dy + centre_x;
        const float source_y = sine * dx + cosine * dy + centre_y;
        *to++ = options_.interpolation == Interpolation::nearest
                    ? nearest_pixel(from, image, source_x, source_y)
                    : between_pixels(from, image, source_x, source_y);
      }
    }
  }

  template <typename T>
  T pixel_or_fill(const T* from, const ImageSize& image, int64_t x, int64_t y) const {
    const bool inside = x >= 0 && x < image.width && y >= 0 && y < image.height;
    return inside ? from[y * image.width + x] : static_cast<T>(options_.fill);
  }

  template <typename T>
  T nearest_pixel(const T* from, const ImageSize& image, float x, float y) const {
    return pixel_or_fill(from, image, std::lrintf(x), std::lrintf(y));
  }

  template <typename T>
  T between_pixels(const T* from, const ImageSize& image, float x, float y) const {
    const auto left = static_cast<int64_t>(std::floor(x));
    const auto top = static_cast<int64_t>(std::floor(y));
    const float right_share = x - static_cast<float>(left);
    const float bottom_share = y - static_cast<float>(top);
    const auto at = [&](int64_t dx, int64_t dy) {
      return static_cast<float>(pixel_or_fill(from, image, left + dx, top + dy));
    };
    const float upper = at(0, 0) * (1 - right_share) + at(1, 0) * right_share;
    const float lower = at(0, 1) * (1 - right_share) + at(1, 1) * right_share;
    const float value = upper * (1 - bottom_share) + lower * bottom_share;
    if constexpr (std::is_same_v<T, uint8_t>)
      return static_cast<uint8_t>(std::clamp(std::nearbyint(value), 0.0F, 255.0F));
    else
      return value;
  }

  RandomRotationOptions options_;
};

class Reshape : public Transform {
 public:
  explicit Reshape(std::vector<int64_t> shape, bool flat = false)
      : shape_(std::move(shape)), flat_(flat) {}
  std::string name() const override { return flat_ ? "flatten" : "reshape"; }
  SampleSpec output(const SampleSpec& input) const override {
    SampleSpec result{flat_ ? std::vector<int64_t>{input.numel()} : shape_, input.dtype};
    if (result.numel() != input.numel())
      refuse(*this, input, std::to_string(result.numel()) + " elements for " + result.describe());
    return result;
  }
  void apply(const RowView& rows, const SampleSpec&, const at::Tensor& out,
             const TransformContext&) const override {
    rows.gather_into(out);
  }
  bool is_reshape() const override { return true; }

 private:
  std::vector<int64_t> shape_;
  bool flat_;
};

class BatchTransform : public Transform {
 public:
  BatchTransform(std::string name, std::function<at::Tensor(const at::Tensor&)> function)
      : name_(std::move(name)), function_(std::move(function)) {}
  std::string name() const override { return name_; }
  SampleSpec output(const SampleSpec& input) const override {
    const at::Tensor result = call(at::zeros(input.batch_shape(1), input.dtype));
    return SampleSpec::of_rows(result);
  }
  void apply(const RowView& rows, const SampleSpec& input, const at::Tensor& out,
             const TransformContext&) const override {
    const at::Tensor batch = at::empty(input.batch_shape(rows.size()), input.dtype);
    rows.gather_into(batch);
    const at::Tensor result = call(batch);
    if (result.sizes() != out.sizes() || result.scalar_type() != out.scalar_type())
      throw UsageError("transform '" + name_ + "' returned " + c10::str(result.sizes()) + " of " +
                       c10::toString(result.scalar_type()) + ", but " + c10::str(out.sizes()) +
                       " of " + c10::toString(out.scalar_type()) + " for the same kind of samples");
    out.copy_(result);
  }

 private:
  at::Tensor call(const at::Tensor& batch) const {
    at::Tensor result = function_(batch);
    if (!result.defined() || result.dim() < 1 || result.size(0) != batch.size(0))
      throw UsageError("transform '" + name_ + "' must return one row for each of the batch's " +
                       std::to_string(batch.size(0)) + " rows");
    return result;
  }
  std::string name_;
  std::function<at::Tensor(const at::Tensor&)> function_;
};

}  // namespace

TransformPtr normalize(std::vector<double> mean, std::vector<double> std) {
  return std::make_shared<ToFloat>(std::move(mean), std::move(std));
}

TransformPtr to_float() {
  return std::make_shared<ToFloat>();
}

TransformPtr random_crop(RandomCropOptions options) {
  return std::make_shared<RandomCrop>(options);
}

TransformPtr random_horizontal_flip(double p) {
  return std::make_shared<RandomHorizontalFlip>(p);
}

TransformPtr random_rotation(RandomRotationOptions options) {
  return std::make_shared<RandomRotation>(options);
}

TransformPtr flatten() {
  return std::make_shared<Reshape>(std::vector<int64_t>{}, true);
}

TransformPtr reshape(std::vector<int64_t> shape) {
  return std::make_shared<Reshape>(std::move(shape));
}

TransformPtr batch_transform(std::string name,
                             std::function<at::Tensor(const at::Tensor&)> function) {
  return std::make_shared<BatchTransform>(std::move(name), std::move(function));
}

SampleSpec Compose::output(const SampleSpec& input) const {
  SampleSpec spec = input;
  for (const TransformPtr& transform : transforms_) spec = transform->output(spec);
  return spec;
}

at::Tensor Compose::operator()(const at::Tensor& batch, uint64_t seed, int64_t epoch) const {
  const at::Tensor input = batch.contiguous();
  TransformRunner runner(*this, SampleSpec::of_rows(input));
  at::Tensor out = at::empty(runner.output().batch_shape(input.size(0)), runner.output().dtype);
  std::vector<int64_t> rows(input.size(0));
  std::iota(rows.begin(), rows.end(), 0);
  runner.run(RowView(input, rows), out, seed, epoch, rows);
  return out;
}

}  // namespace lockstep
