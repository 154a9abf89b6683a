#define LOCKSTEP_NORM_POOL_KERNELS kernels_plain
#include "lockstep/models/norm_pool_kernels.inc"
