#include "lockstep/comm/shared_memory/reduction_kernels.h"

namespace lockstep::shm {

ReduceKernel kernels_plain(DataType type, Reduction reduction);
#if defined(LOCKSTEP_SHM_VECTOR_KERNELS)
ReduceKernel kernels_avx2(DataType type, Reduction reduction);
#endif

size_t size_of(DataType type) {
  switch (type) {
    case DataType::u8:
    case DataType::i8:
    case DataType::boolean:
      return 1;
    case DataType::i16:
    case DataType::f16:
    case DataType::bf16:
      return 2;
    case DataType::i32:
    case DataType::f32:
      return 4;
    case DataType::i64:
    case DataType::f64:
    case DataType::c64:
      return 8;
    case DataType::c128:
      return 16;
  }
  return 1;
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
