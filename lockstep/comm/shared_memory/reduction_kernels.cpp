#include "lockstep/comm/shared_memory/reduction_kernels.h"

#include <array>

namespace lockstep::shm {

ReduceKernel kernels_plain(DataType type, Reduction reduction);
#if defined(LOCKSTEP_SHM_VECTOR_KERNELS)
ReduceKernel kernels_avx2(DataType type, Reduction reduction);
#endif

size_t size_of(DataType type) {
  constexpr std::array<uint8_t, 12> kSizes{1, 1, 2, 4, 8, 2, 2, 4, 8, 1, 8, 16};  // As DataType.
  static_assert(kSizes.size() == static_cast<size_t>(DataType::c128) + 1);
  return kSizes[static_cast<size_t>(type)];
}

ReduceKernel reduce_kernel(DataType type, Reduction reduction) {
#if defined(LOCKSTEP_SHM_VECTOR_KERNELS)
  // What sets x86-64-v3 apart, by names that clang before 17 knows as well.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2"))
    return kernels_avx2(type, reduction);
#endif
  return kernels_plain(type, reduction);
}

}  // namespace lockstep::shm
