#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <string>

namespace lockstep {

/// Whether a device computes in a 16-bit dtype faster than in float32.
struct HalfSupport {
  bool fast = false;
  /// What makes it fast ("avx512_bf16, amx_bf16"), or what is missing for it.
  std::string reason;
};

/// By what the processor, or the GPU, says of itself. `dtype` is bfloat16 or float16. It knows CPUs
/// and CUDA; any other device counts as fast.
HalfSupport half_support(c10::Device device, at::ScalarType dtype);

/// Tries a linear layer, a convolution and batch norm in the dtype, forward and backward. Throws
/// UsageError naming what this device and this LibTorch lack. Takes a few milliseconds.
void require_dtype(c10::Device device, at::ScalarType dtype);

namespace detail {

/// "bfloat16", "float16", ...: as Python names it.
std::string dtype_name(at::ScalarType dtype);

}  // namespace detail

}  // namespace lockstep
