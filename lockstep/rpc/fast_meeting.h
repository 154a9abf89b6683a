#pragma once

#include <memory>

#include "lockstep/comm/store.h"
#include "lockstep/rpc/fast_link.h"

namespace lockstep::rpc::detail {

/// The link between the ranks of a job on one host. All ranks call it, and all get one or none:
/// none when a rank does not want it, or one cannot have the memory. Why is written with
/// LOCKSTEP_LOG_LEVEL=debug. Blocks until all have come. Throws what the store throws.
std::shared_ptr<FastLink> meet_over_memory(Store store, int rank, int size, bool wanted);

}  // namespace lockstep::rpc::detail
