#define LOCKSTEP_SHM_KERNELS kernels_avx2
#include "lockstep/comm/shared_memory/reduction_loops.inc"
