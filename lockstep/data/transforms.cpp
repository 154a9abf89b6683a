#include "lockstep/data/transforms.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <numeric>

#include "lockstep/base/error.h"
#include "lockstep/base/random.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse(const Transform& transform, const at::Tensor& batch,
                         const std::string& expected) {
  throw UsageError(transform.name() + " got samples of " + SampleSpec::of_rows(batch).describe() +
                   ", expected " + expected);
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

void look_up(const Table& table, const uint8_t* __restrict from, float* __restrict to,
             int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int64_t k = 0; k < 8; ++k) to[i + k] = table[from[i + k]];
  }
  for (; i < count; ++i) to[i] = table[from[i]];
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

  std::string name() const override { return mean_.empty() ? "to_float" : "normalize"; }

  at::Tensor apply(const at::Tensor& batch, const TransformContext&) const override {
    const bool bytes = batch.scalar_type() == at::kByte;
    if (bytes && batch.dim() != 3 && batch.dim() != 4)
      refuse(*this, batch, "uint8 images [H, W] or [C, H, W]");
    if (!bytes && batch.scalar_type() != at::kFloat) refuse(*this, batch, "uint8 or float32");
    const at::Tensor images = bytes && batch.dim() == 3 ? batch.unsqueeze(1) : batch;
    const auto means = static_cast<int64_t>(mean_.size());
    if (means > 1 && (images.dim() < 2 || images.size(1) != means))
      refuse(*this, batch, std::to_string(means) + " channels, one for each mean");
    if (bytes) return looked_up(images);
    if (mean_.empty()) return images;
    std::vector<int64_t> one_a_channel(std::max<int64_t>(images.dim() - 1, 1), 1);
    one_a_channel[0] = means;
    return images.sub(at::tensor(mean_, at::kFloat).view(one_a_channel))
        .div_(at::tensor(std_, at::kFloat).view(one_a_channel));
  }

 private:
  at::Tensor looked_up(const at::Tensor& images) const {
    at::Tensor floats = at::empty(images.sizes(), at::kFloat);
    const auto* from = images.const_data_ptr<uint8_t>();
    auto* to = floats.mutable_data_ptr<float>();
    const size_t planes = tables_.size() * static_cast<size_t>(images.size(0));
    const int64_t plane = images.numel() / static_cast<int64_t>(std::max<size_t>(planes, 1));
    for (size_t i = 0; i < planes; ++i, from += plane, to += plane)
      look_up(tables_[i % tables_.size()], from, to, plane);
    return floats;
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

ImageSize image_size(const Transform& transform, const at::Tensor& batch) {
  if (batch.dim() == 3) return {1, batch.size(1), batch.size(2)};
  if (batch.dim() == 4) return {batch.size(1), batch.size(2), batch.size(3)};
  refuse(transform, batch, "images [H, W] or [C, H, W]");
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

  at::Tensor apply(const at::Tensor& batch, const TransformContext& context) const override {
    const ImageSize image = image_size(*this, batch);
    const int64_t height = options_.height ? options_.height : image.height;
    const int64_t width = options_.width ? options_.width : image.width;
    const int64_t p = options_.padding;
    const int64_t tops = image.height + 2 * p - height + 1;
    const int64_t lefts = image.width + 2 * p - width + 1;
    if (tops < 1 || lefts < 1)
      refuse(*this, batch,
             "images that with a padding of " + std::to_string(p) + " are at least " +
                 std::to_string(height) + " x " + std::to_string(width));
    const at::Tensor padded = at::constant_pad_nd(batch, {p, p, p, p}, options_.fill);
    std::vector<int64_t> shape = batch.sizes().vec();
    shape.end()[-2] = height;
    shape.end()[-1] = width;
    at::Tensor crops = at::empty(shape, batch.options());
    for (int64_t i = 0; i < batch.size(0); ++i) {
      KeyedRandom random(context.seed, context.epoch, context.indices[i]);
      const auto top = static_cast<int64_t>(random.below(tops));
      const auto left = static_cast<int64_t>(random.below(lefts));
      crops[i].copy_(padded[i].narrow(-2, top, height).narrow(-1, left, width));
    }
    return crops;
  }

 private:
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

  at::Tensor apply(const at::Tensor& batch, const TransformContext& context) const override {
    image_size(*this, batch);
    at::Tensor flipped = batch.clone();
    for (int64_t i = 0; i < batch.size(0); ++i) {
      KeyedRandom random(context.seed, context.epoch, context.indices[i]);
      if (random.uniform() < p_) flipped[i].copy_(batch[i].flip(-1));
    }
    return flipped;
  }

 private:
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

  at::Tensor apply(const at::Tensor& batch, const TransformContext& context) const override {
    if (batch.scalar_type() == at::kByte) return apply_as<uint8_t>(batch, context);
    if (batch.scalar_type() == at::kFloat) return apply_as<float>(batch, context);
    refuse(*this, batch, "uint8 or float32");
  }

 private:
  template <typename T>
  at::Tensor apply_as(const at::Tensor& batch, const TransformContext& context) const {
    const ImageSize image = image_size(*this, batch);
    at::Tensor turned = at::empty_like(batch);
    const auto* from = batch.const_data_ptr<T>();
    auto* to = turned.mutable_data_ptr<T>();
    const int64_t plane = image.height * image.width;
    for (int64_t i = 0; i < batch.size(0); ++i) {
      KeyedRandom random(context.seed, context.epoch, context.indices[i]);
      const double angle =
          random.uniform(-options_.degrees, options_.degrees) * std::numbers::pi / 180;
      for (int64_t c = 0; c < image.channels; ++c, from += plane, to += plane)
        rotate(from, to, image, static_cast<float>(std::cos(angle)),
               static_cast<float>(std::sin(angle)));
    }
    return turned;
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
  at::Tensor apply(const at::Tensor& batch, const TransformContext&) const override {
    const int64_t numel = SampleSpec::of_rows(batch).numel();
    const SampleSpec result{flat_ ? std::vector<int64_t>{numel} : shape_, batch.scalar_type()};
    if (result.numel() != numel)
      refuse(*this, batch, std::to_string(result.numel()) + " elements for " + result.describe());
    return batch.view(result.batch_shape(batch.size(0)));
  }

 private:
  std::vector<int64_t> shape_;
  bool flat_;
};

class BatchTransform : public Transform {
 public:
  BatchTransform(std::string name, std::function<at::Tensor(const at::Tensor&)> function)
      : name_(std::move(name)), function_(std::move(function)) {}
  std::string name() const override { return name_; }
  at::Tensor apply(const at::Tensor& batch, const TransformContext&) const override {
    at::Tensor result = function_(batch);
    if (!result.defined() || result.dim() < 1 || result.size(0) != batch.size(0))
      throw UsageError("transform '" + name_ + "' must return one row for each of the batch's " +
                       std::to_string(batch.size(0)) + " rows");
    return result;
  }

 private:
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
  return SampleSpec::of_rows((*this)(at::zeros(input.batch_shape(1), input.dtype)));
}

at::Tensor Compose::operator()(const at::Tensor& batch, uint64_t seed, int64_t epoch) const {
  std::vector<int64_t> indices(batch.size(0));
  std::iota(indices.begin(), indices.end(), 0);
  return (*this)(batch, seed, epoch, indices);
}

at::Tensor Compose::operator()(const at::Tensor& batch, uint64_t seed, int64_t epoch,
                               std::span<const int64_t> indices) const {
  at::Tensor result = batch.contiguous();
  for (size_t i = 0; i < transforms_.size(); ++i) {
    const TransformContext context{KeyedRandom(seed, i).next(), epoch, indices};
    result = transforms_[i]->apply(result, context).contiguous();
  }
  return result;
}

}  // namespace lockstep
