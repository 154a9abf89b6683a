#define LOCKSTEP_NORM_POOL_KERNELS kernels_avx2
#include "lockstep/models/norm_pool_kernels.inc"
