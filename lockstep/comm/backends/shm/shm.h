#pragma once

#include "lockstep/comm/backends/backend.h"

namespace lockstep::shm {

BackendInfo info();
/// A backend for ranks on one host that meets them through `options.store`. CPU tensors of every
/// dtype that LibTorch's collectives know, contiguous or not. Collectives run in the calling thread
/// when the others come within the time that a hand-over to another thread would cost, else on a
/// thread of the group's own; their order is that of the calls. Throws what Segment throws.
c10::intrusive_ptr<c10d::Backend> make(const BackendOptions& options);

}  // namespace lockstep::shm
