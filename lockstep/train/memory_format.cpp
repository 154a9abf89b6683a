#include "lockstep/train/memory_format.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "lockstep/base/words.h"

namespace lockstep {
namespace {

constexpr const char* kContiguous = "contiguous";
constexpr const char* kChannelsLast = "channels-last";

bool has_convolutions(const torch::nn::Module& module) {
  const auto parameters = module.parameters();
  return std::any_of(parameters.begin(), parameters.end(),
                     [](const at::Tensor& parameter) { return parameter.dim() == 4; });
}

/// Tensor::contiguous takes strides for channels-last that could be, where kernels see contiguous
/// ones: with one channel or one pixel. These strides say it in every case.
at::Tensor laid_out(const at::Tensor& tensor) {
  at::Tensor result = at::empty(tensor.sizes(), tensor.options().requires_grad(false),
                                at::MemoryFormat::ChannelsLast);
  result.copy_(tensor);
  return result;
}

}  // namespace

std::vector<std::string> memory_format_names() {
  return {"auto", kContiguous, kChannelsLast};
}

std::string memory_format_name(at::MemoryFormat format) {
  return format == at::MemoryFormat::ChannelsLast ? kChannelsLast : kContiguous;
}

at::MemoryFormat memory_format_of(const std::string& word, const torch::nn::Module& module,
                                  c10::Device device) {
  expect_one_of("--memory-format", word, memory_format_names());
  if (word == kContiguous) return at::MemoryFormat::Contiguous;
  if (word == kChannelsLast) return at::MemoryFormat::ChannelsLast;
  const at::Context& context = at::globalContext();
  const bool faster = device.is_cpu() && at::hasMKLDNN() && context.userEnabledMkldnn();
  return faster && has_convolutions(module) ? at::MemoryFormat::ChannelsLast
                                            : at::MemoryFormat::Contiguous;
}

void set_memory_format(torch::nn::Module& module, at::MemoryFormat format) {
  if (format != at::MemoryFormat::ChannelsLast) return;
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : module.parameters()) {
    if (parameter.dim() == 4) parameter.set_data(laid_out(parameter));
  }
  for (at::Tensor& buffer : module.buffers()) {
    if (buffer.dim() == 4) buffer.set_data(laid_out(buffer));
  }
}

at::Tensor with_memory_format(const at::Tensor& batch, at::MemoryFormat format) {
  if (format != at::MemoryFormat::ChannelsLast || batch.dim() != 4) return batch;
  if (batch.size(1) != 1 || !batch.is_contiguous()) return laid_out(batch);
  const int64_t width = batch.size(3), pixels = batch.size(2) * width;
  return batch.as_strided(batch.sizes(), {pixels, 1, width, 1});
}

}  // namespace lockstep
