#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <string>

namespace lockstep {

/// Whether a device computes in a 16-bit dtype faster than in float32.
struct HalfSupport {
  bool fast = false;
  /// What makes it fast ("avx512_bf16, amx_bf16"), or what is missing for it, or how slow it is.
  std::string reason;
  /// Whether the device has instructions for it, fast or not.
  bool instructions = false;
};

/// By what the processor, or the GPU, says of itself. A CPU that has instructions for the dtype is
/// fast where a matrix product takes at most 0.9 of float32's time, and the gradient of a
/// convolution at most 4 times: LibTorch has none for float16 on many processors, and then takes a
/// hundred times as long. The first call in a process measures both, in some 0.1 s. `dtype` is
/// bfloat16 or float16. It knows CPUs and CUDA; any other device counts as fast.
HalfSupport half_support(c10::Device device, at::ScalarType dtype);

namespace detail {

/// "bfloat16", "float16", ...: as Python names it.
std::string dtype_name(at::ScalarType dtype);

}  // namespace detail

}  // namespace lockstep
