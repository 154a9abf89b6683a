#include "lockstep/amp/half_support.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

/// Large enough that what a call costs beside the product does not count.
constexpr int64_t kProductSize = 256;
/// A gain that is smaller does not pay for the conversions.
constexpr double kWorthIt = 0.9;
/// A convolution that is this much slower outweighs what the products gain.
constexpr double kMuchSlower = 4;
constexpr int kProductRuns = 15, kGradientRuns = 3;

/// The names by which the kernel knows this processor's instructions.
std::vector<std::string> cpu_flags() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    // "flags" on x86, "Features" on ARM.
    if (!line.starts_with("flags") && !line.starts_with("Features")) continue;
    return split(line.substr(line.find(':') + 1), ' ');
  }
  return {};
}

void product(at::ScalarType dtype) {
  const at::Tensor matrix = at::ones({kProductSize, kProductSize}, dtype);
  at::mm(matrix, matrix);
}

/// LibTorch has kernels for the products in float16 on processors where it has none for these.
void convolution_gradients(at::ScalarType dtype) {
  const at::AutoGradMode with_graph(true);
  const at::Tensor x = at::ones({1, 8, 12, 12}, dtype).requires_grad_();
  const at::Tensor weight = at::ones({8, 8, 3, 3}, dtype).requires_grad_();
  torch::autograd::grad({at::conv2d(x, weight).sum()}, {x, weight});
}

struct Times {
  double half, full;  ///< Microseconds.
};

/// The least of several times in `dtype` and in float32. They take turns, so that other work on the
/// machine disturbs both alike.
Times least_times(void (*operation)(at::ScalarType), at::ScalarType dtype, int runs) {
  using Clock = std::chrono::steady_clock;
  const auto timed = [operation](at::ScalarType in) {
    const auto begin = Clock::now();
    operation(in);
    return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
  };
  Times least{timed(dtype), timed(at::kFloat)};
  for (int run = 1; run < runs; ++run) {
    least.half = std::min(least.half, timed(dtype));
    least.full = std::min(least.full, timed(at::kFloat));
  }
  return least;
}

/// Instructions say little about speed: without AMX LibTorch's products may take twice float32's
/// time, and the gradients of convolutions in float16 a hundred times.
HalfSupport measured_support(at::ScalarType dtype, const std::string& instructions) {
  const Times product_us = least_times(product, dtype, kProductRuns);
  const Times gradient_us = least_times(convolution_gradients, dtype, kGradientRuns);
  const bool slow_product = product_us.half >= kWorthIt * product_us.full;
  if (!slow_product && gradient_us.half < kMuchSlower * gradient_us.full)
    return {true, instructions, true};
  const Times& told = slow_product ? product_us : gradient_us;
  char text[192];
  std::snprintf(text, sizeof text,
                "though the processor has %s, %s takes %.0f us, and %.0f us in float32",
                instructions.c_str(),
                slow_product ? "a product of 256 x 256" : "the gradient of a small convolution",
                told.half, told.full);
  return {false, text, true};
}

HalfSupport cpu_support(at::ScalarType dtype) {
  const std::vector<std::string> wanted =
      dtype == at::kBFloat16 ? std::vector<std::string>{"avx512_bf16", "amx_bf16", "bf16"}
                             : std::vector<std::string>{"avx512_fp16", "amx_fp16", "asimdhp"};
  const auto flags = cpu_flags();
  std::vector<std::string> found;
  for (const std::string& flag : wanted) {
    if (std::find(flags.begin(), flags.end(), flag) != flags.end()) found.push_back(flag);
  }
  if (!found.empty()) return measured_support(dtype, join(found, ", "));
  return {false, "the processor has no instructions for it (" + join(wanted, ", ") + ")"};
}

/// So that a process is told the same each time.
const HalfSupport& measured_once(at::ScalarType dtype) {
  if (dtype == at::kBFloat16) {
    static const HalfSupport bfloat16 = cpu_support(at::kBFloat16);
    return bfloat16;
  }
  static const HalfSupport float16 = cpu_support(at::kHalf);
  return float16;
}

HalfSupport cuda_support(at::ScalarType dtype) {
  if (!at::hasCUDA()) return {false, "this LibTorch has no CUDA device"};
  // Both came with the tensor cores of compute capability 8.0; those of float16 with 7.0, which
  // every GPU has that CUDA 13 supports.
  if (dtype == at::kHalf) return {true, "tensor cores", true};
  return at::detail::getCUDAHooks().supportsBFloat16ConvolutionWithCuDNNv8()
             ? HalfSupport{true, "tensor cores", true}
             : HalfSupport{false, "the GPU's compute capability is below 8.0"};
}

}  // namespace

HalfSupport half_support(c10::Device device, at::ScalarType dtype) {
  if (dtype != at::kBFloat16 && dtype != at::kHalf) {
    throw UsageError("half_support: " + detail::dtype_name(dtype) + " is no 16-bit dtype");
  }
  if (device.is_cpu()) return measured_once(dtype);
  if (device.is_cuda()) return cuda_support(dtype);
  return {true, "not known to be slow", true};
}

std::string detail::dtype_name(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

}  // namespace lockstep
