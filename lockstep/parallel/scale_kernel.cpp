#include "lockstep/parallel/scale_kernel.h"

namespace lockstep::detail {
namespace {

template <class T>
void multiply(T* __restrict target, const T* __restrict source, int64_t count, T factor) {
  for (int64_t i = 0; i < count; ++i) target[i] = source[i] * factor;
}

}  // namespace

void scale(float* target, const float* source, int64_t count, float factor) {
  multiply(target, source, count, factor);
}

void scale(double* target, const double* source, int64_t count, double factor) {
  multiply(target, source, count, factor);
}

}  // namespace lockstep::detail
