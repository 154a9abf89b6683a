#pragma once

#include <ATen/core/Tensor.h>

namespace torch::nn {
class BatchNorm2dImpl;
}

namespace lockstep {

/// max_pool2d(relu(norm(x)), 2, 2), the tail of a block of a convolutional net.
///
/// In training on the CPU with images in channels-last order, it is one pass over `x` for
/// the statistics and one for the rest. Backward is another two. The three operations and their
/// gradients are about ten passes, and take three times as long. Only the largest value of each
/// window has a gradient. So the sums that batch norm's gradient needs run over a quarter of the
/// elements. The sums are those of the operations in another order: statistics one image at a time,
/// then in double (Chan, Golub, LeVeque 1979). Results agree to a few units in the last place of
/// float32, and do not depend on the number of threads. Statistics of evaluation are updated as by
/// the module. Gradients of gradients throw UsageError. Images are in float32 or
/// bfloat16, the norm's own tensors in float32: so it is under autocast and with float32 batch norm
/// in a bfloat16 model. The arithmetic is float32's, and a bfloat16 result is rounded once, at the
/// end, where the operations round three times.
///
/// Everything else takes the plain operations, to their bits:
/// - contiguous images, evaluation, other dtypes and devices,
/// - channels that are no multiple of 8,
/// - a norm without affine parameters, statistics or momentum.
///
/// `x` is [N, C, H, W] with H and W of at least 2. Gives [N, C, H/2, W/2].
at::Tensor norm_relu_pool(const at::Tensor& x, torch::nn::BatchNorm2dImpl& norm);

/// Whether norm_relu_pool would take the fast way.
bool norm_relu_pool_is_fused(const at::Tensor& x, const torch::nn::BatchNorm2dImpl& norm);

}  // namespace lockstep
