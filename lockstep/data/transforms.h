#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/data/dataset.h"

namespace lockstep {

/// What a transform's random numbers depend on: the seed, the epoch and the sample's index in the
/// dataset, and nothing else. So they do not change with the number of workers or ranks.
struct TransformContext {
  uint64_t seed = 0;  ///< Already mixed with the transform's place in its Compose.
  int64_t epoch = 0;
  std::span<const int64_t> indices;  ///< The samples' indices in the dataset, one per row.
};

/// One step from raw samples to the model's input. It works on a whole batch. Its functions are
/// const, so that all threads can share one object.
class Transform {
 public:
  virtual ~Transform() = default;
  virtual std::string name() const = 0;
  /// Gives a batch with as many rows. `batch` [B, ...] is a contiguous CPU tensor that must not be
  /// written to; the result may share its memory. Samples of one shape and dtype become samples of
  /// one shape and dtype. Throws UsageError if it cannot take them. Called once with one sample of
  /// zeros to learn what it gives.
  virtual at::Tensor apply(const at::Tensor& batch, const TransformContext& context) const = 0;
};

using TransformPtr = std::shared_ptr<const Transform>;

/// torchvision's ToTensor and Normalize in one pass, to the last bit. uint8 [H, W] or [C, H, W]
/// becomes float32 [C, H, W], divided by 255, minus mean, divided by std. float32 [C, ...] is only
/// normalised. Give one mean and std for all channels, or one per channel. The defaults are those
/// of MNIST's training images. Throws UsageError for a std of 0.
TransformPtr normalize(std::vector<double> mean = {0.1307}, std::vector<double> std = {0.3081});

/// torchvision's ToTensor alone: uint8 [H, W] or [C, H, W] becomes float32 [C, H, W] in [0, 1].
/// float32 stays as it is.
TransformPtr to_float();

struct RandomCropOptions {
  int64_t height = 0;   ///< Of the crop; 0: the image's own, for use with padding.
  int64_t width = 0;    ///< As height.
  int64_t padding = 0;  ///< Pixels added on every side before the crop.
  double fill = 0;      ///< The padding's value, in the image's own dtype and scale.
};
/// Crops at a random position. Images [H, W] or [C, H, W] of any dtype.
TransformPtr random_crop(RandomCropOptions options);

/// Flips each image horizontally with probability p. Images [H, W] or [C, H, W] of any dtype.
TransformPtr random_horizontal_flip(double p = 0.5);

enum class Interpolation { nearest, bilinear };
struct RandomRotationOptions {
  double degrees = 10;  ///< Uniform in [-degrees, degrees); positive is counter-clockwise.
  Interpolation interpolation = Interpolation::nearest;  ///< As torchvision's default.
  double fill = 0;  ///< Value of pixels from outside, in the image's own dtype and scale.
};
/// Rotates the image about its centre and keeps its size. Images [H, W] or [C, H, W], uint8 or
/// float32. Source positions and rounding are those of torchvision on tensors (affine_grid and
/// grid_sample with align_corners false).
TransformPtr random_rotation(RandomRotationOptions options = {});

/// [B, ...] becomes [B, numel]. Costs nothing.
TransformPtr flatten();
/// [B, ...] becomes [B, shape...] of as many elements. Costs nothing.
TransformPtr reshape(std::vector<int64_t> shape);

/// A user's own function from a batch [B, ...] to a batch [B, ...]. It must treat rows alike and
/// independently, and be safe to call from several threads. See Transform::apply.
TransformPtr batch_transform(std::string name,
                             std::function<at::Tensor(const at::Tensor&)> function);

/// Applies transforms one after the other, as torchvision.transforms.Compose. An empty list leaves
/// samples unchanged. Cheap to copy.
class Compose {
 public:
  Compose() = default;
  Compose(std::initializer_list<TransformPtr> transforms) : transforms_(transforms) {}
  explicit Compose(std::vector<TransformPtr> transforms) : transforms_(std::move(transforms)) {}

  const std::vector<TransformPtr>& transforms() const { return transforms_; }
  bool empty() const { return transforms_.empty(); }
  /// Throws UsageError naming the transform that cannot take what reaches it.
  SampleSpec output(const SampleSpec& input) const;

  /// Transforms a whole tensor [N, ...] at once, as a loader would with this seed, this epoch and
  /// the samples' indices, or indices 0..N-1. Without any transform it is the tensor itself.
  at::Tensor operator()(const at::Tensor& batch, uint64_t seed = 0, int64_t epoch = 0) const;
  at::Tensor operator()(const at::Tensor& batch, uint64_t seed, int64_t epoch,
                        std::span<const int64_t> indices) const;

 private:
  std::vector<TransformPtr> transforms_;
};

}  // namespace lockstep
