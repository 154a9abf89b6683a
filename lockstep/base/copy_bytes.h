#pragma once

#include <cstddef>
#include <cstring>

namespace lockstep {

/// memcpy that allows what memcpy does not: no bytes without an address, and bytes that lie already
/// where they go.
inline void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace lockstep
