#include "lockstep/comm/shared_memory/reduction_kernels.h"

namespace lockstep::shm {

ReduceKernel kernels_plain(DataType type, Reduction reduction);
#if defined(LOCKSTEP_SHM_VECTOR_KERNELS)
ReduceKernel kernels_avx2(DataType type, Reduction reduction);
#endif

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
