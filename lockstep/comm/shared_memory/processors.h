#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep::shm {

/// Processors by their numbers, one bit each. Empty: not known, as on a machine of more than 1024.
using ProcessorSet = std::array<uint64_t, 16>;

/// Those of lockstep::allowed_processors().
ProcessorSet own_processors();

/// Whether a rank has a processor while all the others of its group compute. Rank i is bound to
/// those of `ranks[i]`. It is judged from the rank's own set: no more ranks stay within that set
/// than it has processors. Sets that overlap in part are not added up.
bool has_own_processor(const std::vector<ProcessorSet>& ranks, size_t rank);

/// Whether a thread beside each rank's own has a processor as well.
bool has_spare_processors(int ranks);

}  // namespace lockstep::shm
