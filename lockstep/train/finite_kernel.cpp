#include "lockstep/train/finite_kernel.h"

#include <cstring>

namespace lockstep {
namespace {

template <class Bits>
struct Lanes {
  typedef Bits Vector __attribute__((vector_size(32)));
};

/// NaN and infinity have all bits of the exponent set: one more carries into the sign.
template <class Bits, Bits exponent>
[[gnu::always_inline]] inline bool all_below(const char* data, int64_t count) {
  using Vector = Lanes<Bits>::Vector;
  constexpr Bits kOne = exponent & (~exponent + 1);
  constexpr Bits kCarried = exponent + kOne;
  constexpr int kAtOnce = 4;
  constexpr int64_t kStep = kAtOnce * static_cast<int64_t>(sizeof(Vector));
  const char* const end = data + count * static_cast<int64_t>(sizeof(Bits));
  Vector seen[kAtOnce] = {};
  for (; end - data >= kStep; data += kStep) {
    for (int i = 0; i < kAtOnce; ++i) {
      Vector values;
      std::memcpy(&values, data + i * sizeof values, sizeof values);
      seen[i] |= (values & exponent) + kOne;
    }
  }
  const Vector together = (seen[0] | seen[1]) | (seen[2] | seen[3]);
  Bits any = 0;
  for (size_t lane = 0; lane < sizeof(Vector) / sizeof(Bits); ++lane) any |= together[lane];
  for (; data < end; data += sizeof(Bits)) {
    Bits value;
    std::memcpy(&value, data, sizeof value);
    any |= static_cast<Bits>((value & exponent) + kOne);
  }
  return (any & kCarried) == 0;
}

#if defined(__x86_64__)
template <class Bits, Bits exponent>
[[gnu::target("avx2")]] bool all_below_avx2(const char* data, int64_t count) {
  return all_below<Bits, exponent>(data, count);
}
#endif

template <class Bits, Bits exponent>
bool is_below(const void* data, int64_t count) {
  const auto* bytes = static_cast<const char*>(data);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return all_below_avx2<Bits, exponent>(bytes, count);
#endif
  return all_below<Bits, exponent>(bytes, count);
}

}  // namespace

bool are_finite(const double* data, int64_t count) {
  return is_below<uint64_t, 0x7ff0'0000'0000'0000>(data, count);
}

bool are_finite(const float* data, int64_t count) {
  return is_below<uint32_t, 0x7f80'0000>(data, count);
}

bool are_finite_half(const uint16_t* data, int64_t count) {
  return is_below<uint16_t, 0x7c00>(data, count);
}

bool are_finite_bfloat16(const uint16_t* data, int64_t count) {
  return is_below<uint16_t, 0x7f80>(data, count);
}

}  // namespace lockstep
