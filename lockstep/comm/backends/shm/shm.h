#pragma once

#include "lockstep/comm/backends/backend.h"

namespace lockstep::shm {

inline constexpr BackendTraits kTraits{
    .takes_strided = true, .runs_in_caller = true, .names_failures = true};

BackendInfo info();
/// A backend for ranks on one host that meets them through `options.store`. CPU tensors of every
/// dtype that LibTorch's collectives know, contiguous or not. Collectives run in the calling thread
/// when the others come within the time that a hand-over to another thread would cost. Else they
/// run on a thread of the group's own. Their order is that of the calls. Throws what Segment
/// throws.
MadeBackend make(const BackendOptions& options);

}  // namespace lockstep::shm
