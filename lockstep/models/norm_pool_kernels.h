#pragma once

#include <cstdint>

// The arithmetic of norm_relu_pool, one image at a time, without LibTorch. It is compiled once for
// the vector instructions that every processor has and once for those of newer ones.

namespace lockstep::norm_pool {

/// Channels that the kernels take at once. An image's channels are a multiple of it.
inline constexpr int64_t kVector = 8;

/// bfloat16 in memory: the upper half of a float32.
struct Bfloat16 {
  uint16_t bits;
};

/// An image in channels-last order: [height, width, channels] in memory. Pooling leaves
/// out an odd last row or column.
struct Image {
  int64_t height = 0;
  int64_t width = 0;
  int64_t channels = 0;
  int64_t pixels() const { return height * width; }
  int64_t pooled_height() const { return height / 2; }
  int64_t pooled_width() const { return width / 2; }
  int64_t pooled_pixels() const { return pooled_height() * pooled_width(); }
};

/// Where in its 2 x 2 window the largest value lay (row-major, the first of equals), or this when
/// none was above 0.
inline constexpr uint8_t kNowhere = 4;

/// `Element` is float or Bfloat16: what images and their gradients are in memory. All arithmetic is
/// float32's.
template <class Element>
struct Kernels {
  /// A channel's mean and the sum of squared differences from it, over the image. [channels] each.
  void (*moments)(const Image& image, const Element* x, float* mean, float* squares);
  /// pooled = max(0, largest of x * scale + shift in the window). `chosen` is the x that gave it,
  /// `place` where it lay. [pooled pixels, channels] each. A NaN is larger than all else.
  void (*forward)(const Image& image, const Element* x, const float* scale, const float* shift,
                  Element* pooled, Element* chosen, uint8_t* place);
  /// Over the pooled pixels whose place is somewhere: the sums of the gradient, and those of the
  /// gradient times (chosen - mean). [channels] each.
  void (*sums)(const Image& image, const Element* gradient, const Element* chosen,
               const uint8_t* place, const float* mean, float* sum, float* product);
  /// grad_x = dy * scale - x * slope - offset, with dy the window's gradient at its place and 0
  /// elsewhere.
  void (*backward)(const Image& image, const Element* x, const Element* gradient,
                   const uint8_t* place, const float* scale, const float* slope,
                   const float* offset, Element* grad_x);
};

/// Those of both elements, compiled for one kind of processor.
struct AllKernels {
  Kernels<float> of_float;
  Kernels<Bfloat16> of_bfloat16;
};

/// The fastest that this processor runs.
const AllKernels& kernels();

}  // namespace lockstep::norm_pool
