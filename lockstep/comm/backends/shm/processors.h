#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep::shm {

/// Processors by their numbers, a bit each. Empty: not known, as on a machine of more than 1024.
using ProcessorSet = std::array<uint64_t, 16>;

/// Those that the calling thread may run on.
ProcessorSet allowed_processors();

/// Whether a rank can compute while all the others of its host do, each bound to the processors of
/// `ranks[i]`: no more of them must stay within its set than that has processors.
bool has_own_processor(const std::vector<ProcessorSet>& ranks, size_t rank);

/// Whether a thread beside each rank's own has a processor as well.
bool has_spare_processors(int ranks);

}  // namespace lockstep::shm
