#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "lockstep/comm/process_group.h"

namespace lockstep {

/// A tensor of `numel` elements that is the same memory on all ranks of the group: what one rank
/// writes, the others read where it lies. It exists once per host, however many ranks there are.
/// Zeroed. Undefined, on all ranks, where they have no such memory: backends other than shm,
/// several hosts, devices other than the CPU.
///
/// The caller orders reads and writes, by barriers or other calls of the group. All ranks call with
/// the same arguments (MismatchError). The tensor may outlive the group. Collective calls take it
/// as any other tensor.
at::Tensor common_empty(const ProcessGroup& group, int64_t numel, at::ScalarType dtype);

}  // namespace lockstep
