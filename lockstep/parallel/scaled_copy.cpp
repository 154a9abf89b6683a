#include "lockstep/parallel/scaled_copy.h"

#include <ATen/Parallel.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>

#include "lockstep/optim/dense_layout.h"

namespace lockstep::detail {
namespace {

/// From here on at::mul shares the work out to threads.
constexpr int64_t kOneThread = 32768;

template <class T>
void scale(T* __restrict target, const T* __restrict source, int64_t count, T factor) {
  for (int64_t i = 0; i < count; ++i) target[i] = source[i] * factor;
}

}  // namespace

void scaled_copy(const at::Tensor& target, const at::Tensor& source, double factor) {
  const int64_t count = target.numel();
  const bool plain = target.is_cpu() && target.strides() == source.strides() && is_dense(target) &&
                     is_dense(source) && (count <= kOneThread || at::get_num_threads() == 1);
  if (plain && target.scalar_type() == at::kFloat && source.scalar_type() == at::kFloat) {
    scale(target.mutable_data_ptr<float>(), source.const_data_ptr<float>(), count,
          static_cast<float>(factor));
  } else if (plain && target.scalar_type() == at::kDouble && source.scalar_type() == at::kDouble) {
    scale(target.mutable_data_ptr<double>(), source.const_data_ptr<double>(), count, factor);
  } else {
    at::Tensor scalar = at::scalar_tensor(factor, at::kDouble);
    scalar.unsafeGetTensorImpl()->set_wrapped_number(true);
    at::Tensor out = target;
    at::mul_out(out, source, scalar);
  }
}

void scaled_copy(const at::Tensor& target, int64_t to, const at::Tensor& source, int64_t from,
                 int64_t count, double factor) {
  if (target.is_cpu() && target.scalar_type() == at::kFloat && source.scalar_type() == at::kFloat &&
      (count <= kOneThread || at::get_num_threads() == 1)) {
    scale(target.mutable_data_ptr<float>() + to, source.const_data_ptr<float>() + from, count,
          static_cast<float>(factor));
  } else {
    scaled_copy(target.narrow(0, to, count), source.narrow(0, from, count), factor);
  }
}

}  // namespace lockstep::detail
