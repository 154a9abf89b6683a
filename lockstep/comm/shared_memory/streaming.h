#pragma once

#include <cstddef>

namespace lockstep::shm {

#if defined(__x86_64__)
inline constexpr bool kCanStream = true;
#else
inline constexpr bool kCanStream = false;  ///< What follows is there and does without.
#endif

/// memcpy past the caches, straight to memory (non-temporal stores), for data that a processor far
/// away reads next: the lines need not be fetched from that processor's cache before they are
/// written, nor from this one's when they are read. Others see it after `end_stream`, which comes
/// before what tells them of it.
void stream_bytes(std::byte* to, const std::byte* from, size_t bytes);
void end_stream();

/// Loads that come after it in the program do not start before those ahead of it have ended: a
/// processor that guesses how a branch goes would else begin them early.
void end_loads();

}  // namespace lockstep::shm
