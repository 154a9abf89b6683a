#pragma once

#include <algorithm>
#include <cstddef>

namespace lockstep {

/// Reverses the bytes of each of `count` items of `item_size` bytes, in place.
inline void swap_bytes(void* items, size_t count, size_t item_size) {
  if (item_size == 1) return;
  auto* bytes = static_cast<unsigned char*>(items);
  for (size_t i = 0; i < count; ++i, bytes += item_size) std::reverse(bytes, bytes + item_size);
}

}  // namespace lockstep
