#define LOCKSTEP_SHM_KERNELS kernels_plain
#include "lockstep/comm/backends/shm/reduce_kernels.inc"
