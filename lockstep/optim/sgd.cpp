#include "lockstep/optim/sgd.h"

#include <ATen/Functions.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <cmath>

#include "lockstep/optim/dense_layout.h"
#include "lockstep/optim/optimizer_state.h"

namespace lockstep {
namespace {

/// A multiple of the floats in every vector register that LibTorch's kernels use.
constexpr int64_t kBlock = 16;
/// Below this a loop over the elements costs less than another entry in a fused call.
constexpr int64_t kSmall = 2 * kBlock;
constexpr const char* kBuffer = "momentum_buffer";

bool is_plain_float(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.device().is_cpu() && is_dense(tensor);
}

template <bool kOnce>
float multiply_add(float a, float b, float c) {
  if constexpr (kOnce) return std::fma(a, b, c);
  // The way over double keeps the compiler from contracting the two roundings to one.
  return static_cast<float>(static_cast<double>(a) * static_cast<double>(b)) + c;
}

struct Factors {
  float lr, momentum, keep, weight_decay;
  bool nesterov;
};

template <bool kOnce>
void update(float* parameter, const float* gradient, float* buffer, int64_t begin, int64_t end,
            const Factors& f) {
  for (int64_t i = begin; i < end; ++i) {
    float g = gradient[i];
    if (f.weight_decay != 0) g = multiply_add<kOnce>(parameter[i], f.weight_decay, g);
    if (buffer != nullptr) {
      const float decayed =
          static_cast<float>(static_cast<double>(buffer[i]) * static_cast<double>(f.momentum));
      buffer[i] = multiply_add<kOnce>(g, f.keep, decayed);
      g = f.nesterov ? multiply_add<kOnce>(buffer[i], f.momentum, g) : buffer[i];
    }
    parameter[i] = multiply_add<kOnce>(g, -f.lr, parameter[i]);
  }
}

/// How at::add_ with a factor rounds, in full vectors and after them.
Sgd::Rounding add_rounding() {
  const float b = 1 + std::ldexp(1.0f, -12);  // b * b needs one bit more than a float has.
  at::Tensor sum = at::full({4 * kBlock + kBlock - 1}, -1, at::kFloat);
  sum.add_(at::full_like(sum, b), b);
  const float once = std::fma(b, b, -1.0f);
  const float twice = multiply_add<false>(b, b, -1.0f);
  const float first = sum.data_ptr<float>()[0];
  if (!sum.eq(first).all().item<bool>()) return Sgd::Rounding::unknown;
  if (first == once) return Sgd::Rounding::once;
  return first == twice ? Sgd::Rounding::twice : Sgd::Rounding::unknown;
}

}  // namespace

Sgd::Sgd(std::vector<at::Tensor> parameters, const OptimizerOptions& options)
    : parameters_(std::move(parameters)),
      buffers_(parameters_.size()),
      lr_(options.lr),
      momentum_(options.momentum),
      dampening_(options.dampening),
      weight_decay_(options.weight_decay.value_or(0)),
      nesterov_(options.nesterov),
      rounding_(find_rounding()) {
  fused_parameters_.reserve(parameters_.size());
  fused_gradients_.reserve(parameters_.size());
  fused_buffers_.reserve(parameters_.size());
}

Sgd::Rounding Sgd::find_rounding() const {
  const c10::AutoGradMode no_grad(false);
  const Rounding rounding = add_rounding();
  if (rounding == Rounding::unknown) return rounding;
  // Fused and plain, on numbers of one magnitude, where a rounding too few soon shows. A sine gives
  // them without touching the user's random state.
  constexpr int64_t kCount = 1024;
  const at::Tensor angle = at::arange(kCount, at::kFloat);
  at::Tensor p = angle.sin(), g = angle.mul(1.7).cos(), buffer = angle.mul(2.3).sin();
  at::Tensor p2 = p.clone(), buffer2 = buffer.clone();
  const double lr = 0.7, decay = weight_decay_ != 0 ? 0.3 : 0;
  at::Tensor d = decay != 0 ? g.add(p, decay) : g;
  if (momentum_ != 0) {
    buffer.mul_(momentum_).add_(d, 1 - dampening_);
    d = nesterov_ ? d.add(buffer, momentum_) : buffer;
  }
  p.add_(d, -lr);
  const std::vector<at::Tensor> buffers =
      momentum_ != 0 ? std::vector{buffer2} : std::vector<at::Tensor>{};
  at::_fused_sgd_({p2}, {g}, buffers, decay, momentum_, lr, dampening_, nesterov_, false, false);
  return at::equal(p, p2) && at::equal(buffer, momentum_ != 0 ? buffer2 : buffer)
             ? rounding
             : Rounding::unknown;
}

void Sgd::step() {
  const c10::AutoGradMode no_grad(false);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& gradient = parameters_[i].grad();
    if (!gradient.defined()) continue;
    if (!can_fuse(i, gradient)) {
      step_plain(i, gradient);
      continue;
    }
    const int64_t count = gradient.numel();
    const int64_t bulk = count < kSmall ? 0 : count - count % kBlock;
    if (bulk > 0) add_to_fused(i, gradient);
    if (bulk < count) step_elements(i, gradient, bulk);
  }
  if (!fused_parameters_.empty()) run_fused();
}

bool Sgd::can_fuse(size_t index, const at::Tensor& gradient) const {
  if (rounding_ == Rounding::unknown) return false;
  if (momentum_ != 0 && !buffers_[index].defined()) return false;  // The first gradient is copied.
  const at::Tensor& parameter = parameters_[index];
  const auto fits = [&](const at::Tensor& tensor) {
    return is_plain_float(tensor) && same_order(tensor, parameter);
  };
  return is_plain_float(parameter) && fits(gradient) && (momentum_ == 0 || fits(buffers_[index]));
}

void Sgd::step_plain(size_t index, const at::Tensor& gradient) {
  at::Tensor& parameter = parameters_[index];
  at::Tensor d = weight_decay_ != 0 ? gradient.add(parameter, weight_decay_) : gradient;
  if (momentum_ != 0) {
    at::Tensor& buffer = buffers_[index];
    if (buffer.defined()) {
      // As a tensor, which is how Python passes a number: mul_ with a Scalar rounds it to the
      // buffer's dtype first, which shows in bfloat16.
      buffer.mul_(at::native::wrapped_scalar_tensor(momentum_)).add_(d, 1 - dampening_);
    } else {
      buffer = d.detach().clone();
    }
    d = nesterov_ ? d.add(buffer, momentum_) : buffer;
  }
  parameter.add_(d, -lr_);
}

void Sgd::step_elements(size_t index, const at::Tensor& gradient, int64_t begin) {
  at::Tensor& parameter = parameters_[index];
  const Factors factors{static_cast<float>(lr_), static_cast<float>(momentum_),
                        static_cast<float>(1 - dampening_), static_cast<float>(weight_decay_),
                        nesterov_};
  float* buffer = momentum_ != 0 ? buffers_[index].mutable_data_ptr<float>() : nullptr;
  auto* run = rounding_ == Rounding::once ? &update<true> : &update<false>;
  run(parameter.mutable_data_ptr<float>(), gradient.const_data_ptr<float>(), buffer, begin,
      gradient.numel(), factors);
  // As every in-place operation does, so that autograd notices a use of the old value.
  parameter.unsafeGetTensorImpl()->bump_version();
}

void Sgd::add_to_fused(size_t index, const at::Tensor& gradient) {
  const int64_t count = gradient.numel(), bulk = count - count % kBlock;
  const auto part = [&](const at::Tensor& tensor) {
    return bulk == count && tensor.is_contiguous() ? tensor : head(tensor, bulk);
  };
  fused_parameters_.push_back(part(parameters_[index]));
  fused_gradients_.push_back(part(gradient));
  if (momentum_ != 0) fused_buffers_.push_back(part(buffers_[index]));
}

void Sgd::run_fused() {
  {
    // Straight to the kernel; versions are counted here instead.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::_fused_sgd_(fused_parameters_, fused_gradients_, fused_buffers_, weight_decay_, momentum_,
                    lr_, dampening_, nesterov_, /*maximize=*/false, /*is_first_step=*/false);
  }
  for (at::Tensor& parameter : fused_parameters_) parameter.unsafeGetTensorImpl()->bump_version();
  fused_parameters_.clear();
  fused_gradients_.clear();
  fused_buffers_.clear();
}

StateDict Sgd::state() const {
  StateDict state;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (buffers_[i].defined()) state.emplace_back(state_key(kBuffer, i), buffers_[i]);
  }
  return state;
}

void Sgd::load_state(const StateDict& state) {
  std::vector<at::Tensor> buffers(parameters_.size());
  for (const auto& [index, fields] : read_state(name_, state, {kBuffer}, parameters_)) {
    if (momentum_ != 0) buffers[index] = copy_like(fields.at(kBuffer), parameters_[index]);
  }
  buffers_ = std::move(buffers);
}

}  // namespace lockstep
