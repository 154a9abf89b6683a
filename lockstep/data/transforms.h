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

#include "lockstep/data/sample_source.h"

namespace lockstep {

/// What a transform may draw its random numbers from. A sample's numbers come from the seed, the
/// epoch and the sample's index in the data set, and from nothing else. So neither the number of
/// workers nor that of ranks changes them.
struct TransformContext {
  uint64_t seed = 0;  ///< Already mixed with the transform's place in its Compose.
  int64_t epoch = 0;
  std::span<const int64_t> indices;  ///< The samples' indices in the data set, one per row.
};

/// A step from raw samples to what the model gets. It works on a whole batch. Const: one object
/// serves all threads.
class Transform {
 public:
  virtual ~Transform() = default;
  virtual std::string name() const = 0;
  /// What comes out when samples like `input` go in. Throws UsageError when they cannot.
  virtual SampleSpec output(const SampleSpec& input) const = 0;
  /// Reads the rows, each one contiguous sample like `input`, and writes all of `out` [rows.size(),
  /// ...], contiguous. The rows may lie in the data set itself and must not be written to.
  virtual void apply(const RowView& rows, const SampleSpec& input, const at::Tensor& out,
                     const TransformContext& context) const = 0;
  /// True when only the shape changes and no byte moves: `apply` is not called then.
  virtual bool is_reshape() const { return false; }
};

using TransformPtr = std::shared_ptr<const Transform>;

/// torchvision's ToTensor and Normalize in one pass, to the last bit. uint8 [H, W] or [C, H, W]
/// becomes float32 [C, H, W], divided by 255, minus mean, divided by std. float32 [C, ...] is only
/// normalised. One mean and std serve all channels, or there is one per channel.
/// The defaults are those of MNIST's training images. Throws UsageError for a std of 0.
TransformPtr normalize(std::vector<double> mean = {0.1307}, std::vector<double> std = {0.3081});

/// torchvision's ToTensor alone: uint8 [H, W] or [C, H, W] becomes float32 [C, H, W] in [0, 1].
/// float32 stays as it is.
TransformPtr to_float();

struct RandomCropOptions {
  int64_t height = 0;   ///< Of the crop; 0: the image's own, for use with padding.
  int64_t width = 0;    ///< As height.
  int64_t padding = 0;  ///< Pixels added at every side before the crop.
  double fill = 0;      ///< The padding's value, in the image's own dtype and scale.
};
/// Images [H, W] or [C, H, W] of any dtype. Every position is equally likely.
TransformPtr random_crop(RandomCropOptions options);

/// Mirrors left and right with probability p. Images [H, W] or [C, H, W] of any dtype.
TransformPtr random_horizontal_flip(double p = 0.5);

enum class Interpolation { nearest, bilinear };
struct RandomRotationOptions {
  double degrees = 10;  ///< The angle is uniform in [-degrees, degrees); positive turns left.
  Interpolation interpolation = Interpolation::nearest;  ///< As torchvision's default.
  double fill = 0;  ///< For pixels from outside, in the image's own dtype and scale.
};
/// Turns the image about its centre and keeps its size. Images [H, W] or [C, H, W], uint8 or
/// float32. Source positions and rounding are those of torchvision on tensors (affine_grid and
/// grid_sample with align_corners false).
TransformPtr random_rotation(RandomRotationOptions options = {});

/// [B, ...] becomes [B, numel]. Costs nothing.
TransformPtr flatten();
/// [B, ...] becomes [B, shape...] of as many elements. Costs nothing.
TransformPtr reshape(std::vector<int64_t> shape);

/// A user's own function from a batch [B, ...] to a batch [B, ...]. It must treat rows alike and
/// independently, and be safe to call from several threads. Called once with zeros to learn the
/// output's shape.
TransformPtr batch_transform(std::string name,
                             std::function<at::Tensor(const at::Tensor&)> function);

/// Transforms one after the other, as torchvision.transforms.Compose. None: samples pass as they
/// are. Cheap to copy.
class Compose {
 public:
  Compose() = default;
  Compose(std::initializer_list<TransformPtr> transforms) : transforms_(transforms) {}
  explicit Compose(std::vector<TransformPtr> transforms) : transforms_(std::move(transforms)) {}

  const std::vector<TransformPtr>& transforms() const { return transforms_; }
  bool empty() const { return transforms_.empty(); }
  /// Throws UsageError naming the transform that cannot take what reaches it.
  SampleSpec output(const SampleSpec& input) const;

  /// Transforms a whole tensor [N, ...] at once, as a loader would with these seed and epoch and
  /// indices 0..N-1.
  at::Tensor operator()(const at::Tensor& batch, uint64_t seed = 0, int64_t epoch = 0) const;

 private:
  std::vector<TransformPtr> transforms_;
};

}  // namespace lockstep
