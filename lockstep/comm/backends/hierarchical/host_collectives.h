#pragma once

#include <cstddef>
#include <vector>

#include "lockstep/comm/backends/hierarchical/hierarchy.h"

namespace lockstep::hierarchical {

/// What crosses between hosts at a time, in bytes. Smaller data goes in about four chunks. While
/// one chunk is under way between hosts, the next is joined within them and the one before handed
/// out. Of 128 KiB to 4 MiB these were fastest over TCP, measured with one core per host. Smaller
/// chunks cost messages, larger ones leave the cache and overlap less.
inline constexpr size_t kChunkBytes = 512 << 10;
inline constexpr size_t kLeastChunkBytes = 256 << 10;

// The collectives, as bodies for Hierarchy::run. Memory belongs to the caller. Lists of memory have
// one entry per rank of the group, in the order of ranks.

void barrier(Hierarchy& hierarchy);
/// In place.
void all_reduce(Hierarchy& hierarchy, std::byte* data, size_t bytes, const Joining& joining);
void broadcast(Hierarchy& hierarchy, std::byte* data, size_t bytes, int root);
void all_gather(Hierarchy& hierarchy, const std::byte* input, size_t bytes,
                const std::vector<std::byte*>& outputs);
/// `flat`: the group of all ranks, for what passes between hosts. `outputs`: empty on all but the
/// root.
void gather(Hierarchy& hierarchy, c10d::Backend& flat, const std::byte* input, size_t bytes,
            const std::vector<std::byte*>& outputs, int root);
/// `inputs`: empty on all but the root.
void scatter(Hierarchy& hierarchy, c10d::Backend& flat, const std::vector<std::byte*>& inputs,
             std::byte* output, size_t bytes, int root);
/// `sends[r]` goes to rank r, what comes from it into `receives[r]`. Throws MismatchError on all
/// ranks where two do not agree on how much passes between them.
void all_to_all(Hierarchy& hierarchy, c10d::Backend& flat, const shm::Buffers& sends,
                const shm::Buffers& receives);
void reduce_scatter(Hierarchy& hierarchy, const std::vector<const std::byte*>& inputs,
                    std::byte* output, size_t bytes, const Joining& joining);

}  // namespace lockstep::hierarchical
