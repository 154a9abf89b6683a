#define LOCKSTEP_SHM_KERNELS kernels_avx2
#include "lockstep/comm/backends/shm/reduce_kernels.inc"
