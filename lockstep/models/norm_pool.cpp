#include "lockstep/models/norm_pool.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/batchnorm.h>

#include <cmath>
#include <type_traits>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/models/norm_pool_kernels.h"

namespace lockstep {
namespace norm_pool {

extern const AllKernels kernels_plain;
#if defined(LOCKSTEP_NORM_POOL_AVX2)
extern const AllKernels kernels_avx2;
#endif

const AllKernels& kernels() {
#if defined(LOCKSTEP_NORM_POOL_AVX2)
  // What sets x86-64-v3 apart, by names that clang before 17 knows as well.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2"))
    return kernels_avx2;
#endif
  return kernels_plain;
}

}  // namespace norm_pool

namespace {

using norm_pool::Bfloat16;
using norm_pool::Image;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr auto kChannelsLast = at::MemoryFormat::ChannelsLast;

Image image_of(const at::Tensor& x) {
  return {x.size(2), x.size(3), x.size(1)};
}

template <class Element>
const norm_pool::Kernels<Element>& kernels() {
  if constexpr (std::is_same_v<Element, float>) {
    return norm_pool::kernels().of_float;
  } else {
    return norm_pool::kernels().of_bfloat16;
  }
}

template <class Element>
const Element* data_of(const at::Tensor& tensor) {
  return static_cast<const Element*>(tensor.const_data_ptr());
}

template <class Element>
Element* mutable_data_of(const at::Tensor& tensor) {
  return static_cast<Element*>(tensor.mutable_data_ptr());
}

/// Calls `run` with a value of the images' element type.
template <class Run>
auto with_element(const at::Tensor& x, Run run) {
  return x.scalar_type() == at::kFloat ? run(float()) : run(Bfloat16());
}

/// Calls `run(image's index)` for all, on LibTorch's threads.
template <class Run>
void each_image(int64_t images, Run run) {
  at::parallel_for(0, images, /*grain_size=*/1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run(i);
  });
}

/// Not the memory of a lazily negated tensor, and zeros without memory have none.
bool holds_its_values(const at::Tensor& tensor) {
  return !tensor.is_neg() && !tensor._is_zerotensor();
}

float at_channel(const at::Tensor& values, size_t channel) {
  return values.const_data_ptr<float>()[channel];
}

struct Statistics {
  at::Tensor mean;               ///< [C], float32.
  at::Tensor inverse_deviation;  ///< [C], float32: 1 / sqrt(var + eps).
  std::vector<double> squares;   ///< Summed differences from the mean.
};

/// Of each channel over all images: an image's own at a time, then joined in the images' order.
template <class Element>
Statistics statistics_of(const at::Tensor& x, double eps) {
  const Image image = image_of(x);
  const int64_t images = x.size(0), channels = image.channels;
  const at::Tensor parts = at::empty({2, images, channels}, at::kFloat);
  auto* means = parts.mutable_data_ptr<float>();
  auto* squares = means + images * channels;
  const auto* data = data_of<Element>(x);
  each_image(images, [&](int64_t i) {
    kernels<Element>().moments(image, data + i * image.pixels() * channels, means + i * channels,
                               squares + i * channels);
  });
  Statistics result{at::empty({channels}, at::kFloat), at::empty({channels}, at::kFloat),
                    std::vector<double>(static_cast<size_t>(channels))};
  const auto pixels = static_cast<double>(image.pixels());
  const double count = pixels * static_cast<double>(images);
  for (int64_t c = 0; c < channels; ++c) {
    double sum = 0;
    for (int64_t i = 0; i < images; ++i) sum += means[i * channels + c];
    const double mean = sum / static_cast<double>(images);
    double all = 0;
    for (int64_t i = 0; i < images; ++i) {
      const double apart = means[i * channels + c] - mean;
      all += squares[i * channels + c] + pixels * apart * apart;
    }
    result.squares[static_cast<size_t>(c)] = all;
    result.mean.mutable_data_ptr<float>()[c] = static_cast<float>(mean);
    result.inverse_deviation.mutable_data_ptr<float>()[c] =
        static_cast<float>(1 / std::sqrt(all / count + eps));
  }
  return result;
}

void update(torch::nn::BatchNorm2dImpl& norm, const Statistics& statistics, double count) {
  const auto momentum = static_cast<float>(*norm.options.momentum());
  auto* means = norm.running_mean.mutable_data_ptr<float>();
  auto* variances = norm.running_var.mutable_data_ptr<float>();
  for (size_t c = 0; c < statistics.squares.size(); ++c) {
    const auto variance = static_cast<float>(statistics.squares[c] / (count - 1));
    means[c] = momentum * statistics.mean.const_data_ptr<float>()[c] + (1 - momentum) * means[c];
    variances[c] = momentum * variance + (1 - momentum) * variances[c];
  }
  norm.num_batches_tracked += 1;
}

class NormReluPool : public torch::autograd::Function<NormReluPool> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias, const at::Tensor& mean,
                            const at::Tensor& inverse_deviation) {
    const Image image = image_of(x);
    const int64_t images = x.size(0), channels = image.channels;
    const std::vector<int64_t> shape = {images, channels, image.pooled_height(),
                                        image.pooled_width()};
    const at::Tensor pooled = at::empty(shape, x.scalar_type(), kChannelsLast);
    const at::Tensor chosen = at::empty(shape, x.scalar_type(), kChannelsLast);
    const at::Tensor place = at::empty(shape, at::kByte, kChannelsLast);
    std::vector<float> scales(static_cast<size_t>(channels)), shifts(scales.size());
    for (size_t c = 0; c < scales.size(); ++c) {
      scales[c] = at_channel(weight, c) * at_channel(inverse_deviation, c);
      shifts[c] = at_channel(bias, c) - at_channel(mean, c) * scales[c];
    }
    auto* to_place = place.mutable_data_ptr<uint8_t>();
    const int64_t in_size = image.pixels() * channels, out_size = image.pooled_pixels() * channels;
    with_element(x, [&](auto element) {
      using Element = decltype(element);
      const auto* data = data_of<Element>(x);
      auto* to = mutable_data_of<Element>(pooled);
      auto* to_chosen = mutable_data_of<Element>(chosen);
      each_image(images, [&](int64_t i) {
        kernels<Element>().forward(image, data + i * in_size, scales.data(), shifts.data(),
                                   to + i * out_size, to_chosen + i * out_size,
                                   to_place + i * out_size);
      });
    });
    context->save_for_backward({x, weight, mean, inverse_deviation, chosen, place});
    return pooled;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    if (at::GradMode::is_enabled())
      throw UsageError("batch norm, ReLU and pooling as one operation have no second gradient",
                       "give contiguous images, or call backward without create_graph");
    const auto saved = context->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& given = gradients[0];
    const at::Tensor held = holds_its_values(given) ? given : given.clone();
    return with_element(x, [&](auto element) {
      return fast_backward<decltype(element)>(
          saved, held.to(x.scalar_type()).contiguous(kChannelsLast), context->needs_input_grad(0));
    });
  }

 private:
  template <class Element>
  static variable_list fast_backward(const variable_list& saved, const at::Tensor& gradient,
                                     bool needs_x) {
    const at::Tensor &x = saved[0], &weight = saved[1];
    const at::Tensor &mean = saved[2], &inverse_deviation = saved[3];
    const auto* chosen = data_of<Element>(saved[4]);
    const auto* place = saved[5].const_data_ptr<uint8_t>();
    const auto* dy = data_of<Element>(gradient);
    const Image image = image_of(x);
    const int64_t images = x.size(0), channels = image.channels;
    const int64_t in_size = image.pixels() * channels, out_size = image.pooled_pixels() * channels;

    const at::Tensor parts = at::empty({2, images, channels}, at::kFloat);
    auto* sums = parts.mutable_data_ptr<float>();
    each_image(images, [&](int64_t i) {
      kernels<Element>().sums(image, dy + i * out_size, chosen + i * out_size, place + i * out_size,
                              mean.const_data_ptr<float>(), sums + i * channels,
                              sums + (images + i) * channels);
    });
    // The images' sums in their order, whatever the number of threads.
    std::vector<double> total(static_cast<size_t>(2 * channels));
    for (int64_t i = 0; i < 2 * images; ++i) {
      for (int64_t c = 0; c < channels; ++c) {
        total[static_cast<size_t>(i / images * channels + c)] += sums[i * channels + c];
      }
    }
    const at::Tensor grad_weight = at::empty({channels}, at::kFloat);
    const at::Tensor grad_bias = at::empty({channels}, at::kFloat);
    // With a = weight * inverse deviation and means over all pixels, grad_x is
    // a * (dy - mean(dy) - (x - mean) * deviation * mean(dy * normalised x)).
    const auto count = static_cast<double>(images * image.pixels());
    std::vector<float> scales(static_cast<size_t>(channels)), slopes(scales.size()),
        offsets(scales.size());
    for (size_t c = 0; c < scales.size(); ++c) {
      const double deviation = at_channel(inverse_deviation, c);
      const double bias_sum = total[c], weight_sum = total[scales.size() + c] * deviation;
      grad_bias.mutable_data_ptr<float>()[c] = static_cast<float>(bias_sum);
      grad_weight.mutable_data_ptr<float>()[c] = static_cast<float>(weight_sum);
      const double a = at_channel(weight, c) * deviation;
      const double slope = a * deviation * weight_sum / count;
      scales[c] = static_cast<float>(a);
      slopes[c] = static_cast<float>(slope);
      offsets[c] = static_cast<float>(a * bias_sum / count - at_channel(mean, c) * slope);
    }
    at::Tensor grad_x;
    if (needs_x) {
      grad_x = at::empty_like(x);
      const auto* data = data_of<Element>(x);
      auto* to = mutable_data_of<Element>(grad_x);
      each_image(images, [&](int64_t i) {
        kernels<Element>().backward(image, data + i * in_size, dy + i * out_size,
                                    place + i * out_size, scales.data(), slopes.data(),
                                    offsets.data(), to + i * in_size);
      });
    }
    return {grad_x, grad_weight, grad_bias, {}, {}};
  }
};

bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided &&
         holds_its_values(tensor);
}

bool is_float_vector(const at::Tensor& tensor) {
  return is_plain(tensor) && tensor.scalar_type() == at::kFloat && tensor.is_contiguous();
}

/// Batch norm under autocast takes whatever there is, so this does too.
bool has_element(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16;
}

}  // namespace

bool norm_relu_pool_is_fused(const at::Tensor& x, const torch::nn::BatchNorm2dImpl& norm) {
  if (!norm.is_training() || !norm.options.momentum() || !norm.options.track_running_stats() ||
      !norm.options.affine()) {
    return false;
  }
  for (const at::Tensor& tensor : {norm.weight, norm.bias, norm.running_mean, norm.running_var}) {
    if (!is_float_vector(tensor)) return false;
  }
  if (!is_plain(x) || !has_element(x) || x.dim() != 4 || x.size(1) != norm.options.num_features() ||
      x.size(1) % norm_pool::kVector != 0 || x.size(2) < 2 || x.size(3) < 2 || x.size(0) < 1) {
    return false;
  }
  // Under SyncBatchNormGuard at::batch_norm is another one, which must be called.
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::TESTING_ONLY_GenericMode)) {
    return false;
  }
  return x.is_contiguous(kChannelsLast) && !x.is_contiguous();
}

at::Tensor norm_relu_pool(const at::Tensor& x, torch::nn::BatchNorm2dImpl& norm) {
  if (!norm_relu_pool_is_fused(x, norm)) {
    return at::max_pool2d(at::relu(norm.forward(x)), {2, 2}, {2, 2});
  }
  Statistics statistics;
  {
    const at::NoGradGuard no_grad;
    statistics = with_element(
        x, [&](auto element) { return statistics_of<decltype(element)>(x, norm.options.eps()); });
    update(norm, statistics, static_cast<double>(x.size(0) * x.size(2) * x.size(3)));
  }
  return NormReluPool::apply(x, norm.weight, norm.bias, statistics.mean,
                             statistics.inverse_deviation);
}

}  // namespace lockstep
