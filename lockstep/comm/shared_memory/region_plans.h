#pragma once

#include <cstddef>
#include <memory>

#include "lockstep/comm/shared_memory/plans.h"

namespace lockstep::shm {

/// reduce_scatter_plan of data that lies in a region. At `offset` of every rank's part there are
/// `count` elements for each rank, one rank's after the other's. Each rank reduces its own of all
/// parts into `output`, outside of the region. Nothing is copied. When the call is finished, all
/// ranks have read, and the data may be overwritten.
std::unique_ptr<Plan> reduce_scatter_plan(const SharedGroup& group, const Region& region,
                                          size_t offset, std::byte* output, size_t count,
                                          DataType type, ReduceKernel kernel);

}  // namespace lockstep::shm
