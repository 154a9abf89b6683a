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

/// The least of several times of a product of square matrices in `dtype` and in float32, in
/// microseconds. They take turns, so that other work on the machine disturbs both alike.
std::pair<double, double> product_us(at::ScalarType dtype) {
  using Clock = std::chrono::steady_clock;
  constexpr int kRuns = 15;
  const at::Tensor half = at::ones({kProductSize, kProductSize}, dtype), full = half.to(at::kFloat);
  const auto timed = [](const at::Tensor& matrix) {
    const auto begin = Clock::now();
    at::mm(matrix, matrix);
    return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
  };
  std::pair<double, double> least{timed(half), timed(full)};
  for (int run = 1; run < kRuns; ++run) {
    least.first = std::min(least.first, timed(half));
    least.second = std::min(least.second, timed(full));
  }
  return least;
}

/// Instructions say little about speed: without AMX LibTorch's products may take twice float32's
/// time.
HalfSupport measured_support(at::ScalarType dtype, const std::string& instructions) {
  const auto [half, full] = product_us(dtype);
  if (half < kWorthIt * full) return {true, instructions, true};
  char text[160];
  std::snprintf(
      text, sizeof text,
      "though the processor has %s, a product of %ld x %ld takes %.0f us, and %.0f us in float32",
      instructions.c_str(), kProductSize, kProductSize, half, full);
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

/// A sum over the operation's output, and its gradients.
void run_backward(const at::Tensor& output, const std::vector<at::Tensor>& inputs) {
  torch::autograd::grad({output.sum()}, inputs);
}

at::Tensor leaf(at::IntArrayRef shape, const at::TensorOptions& options) {
  return at::ones(shape, options).requires_grad_();
}

void try_linear(const at::TensorOptions& options) {
  const at::Tensor x = leaf({4, 8}, options), weight = leaf({2, 8}, options);
  run_backward(at::linear(x, weight, leaf({2}, options)), {x, weight});
}

void try_convolution(const at::TensorOptions& options) {
  const at::Tensor x = leaf({1, 2, 4, 4}, options), weight = leaf({2, 2, 3, 3}, options);
  run_backward(at::conv2d(x, weight, leaf({2}, options)), {x, weight});
}

void try_batch_norm(const at::TensorOptions& options) {
  const at::Tensor x = leaf({4, 2}, options), weight = leaf({2}, options);
  run_backward(at::batch_norm(x, weight, leaf({2}, options), {}, {}, /*training=*/true,
                              /*momentum=*/0.1, /*eps=*/1e-5, /*cudnn_enabled=*/true),
               {x, weight});
}

void try_operation(const char* name, void (*run)(const at::TensorOptions&), c10::Device device,
                   at::ScalarType dtype) {
  try {
    run(at::device(device).dtype(dtype));
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    throw UsageError("device " + device.str() + " lacks " + detail::dtype_name(dtype) + ": " +
                         name + " fails with: " + what.substr(0, what.find('\n')),
                     "take --precision bf16-mixed or 32-true, or another device");
  }
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

void require_dtype(c10::Device device, at::ScalarType dtype) {
  const at::AutoGradMode with_graph(true);
  try_operation("a linear layer", try_linear, device, dtype);
  try_operation("a convolution", try_convolution, device, dtype);
  try_operation("batch norm", try_batch_norm, device, dtype);
}

std::string detail::dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    default:
      return to_lower(c10::toString(dtype));
  }
}

}  // namespace lockstep
