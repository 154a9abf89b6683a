#pragma once

#include <algorithm>
#include <cstddef>

#include "lockstep/comm/shared_memory/memory.h"

namespace lockstep::hierarchical {

/// `total` bytes in chunks of `size`, the last one smaller; none for 0 bytes.
struct Chunks {
  size_t total = 0;
  size_t size = 1;

  size_t count() const { return (total + size - 1) / size; }
  size_t offset(size_t chunk) const { return std::min(total, chunk * size); }
  size_t bytes(size_t chunk) const { return offset(chunk + 1) - offset(chunk); }
};

using shm::up_to_line;

/// Chunks of whole cache lines: about four of them, none above `largest` nor, where there are
/// several, below `least`.
inline Chunks in_chunks(size_t total, size_t least, size_t largest) {
  return {total, up_to_line(std::clamp((total + 3) / 4, least, std::max(least, largest)))};
}

}  // namespace lockstep::hierarchical
