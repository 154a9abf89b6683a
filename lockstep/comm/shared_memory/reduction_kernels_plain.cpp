#define LOCKSTEP_SHM_KERNELS kernels_plain
#include "lockstep/comm/shared_memory/reduction_loops.inc"
