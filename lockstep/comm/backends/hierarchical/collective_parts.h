#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "lockstep/comm/backends/hierarchical/host_collectives.h"
#include "lockstep/comm/shared_memory/memory.h"

/// What the collectives of a hierarchy are built of.
namespace lockstep::hierarchical {

using Sources = std::vector<const std::byte*>;

/// `total` bytes in chunks of `size`, the last one smaller; none for 0 bytes.
struct Chunks {
  size_t total = 0;
  size_t size = 1;

  size_t count() const { return (total + size - 1) / size; }
  size_t offset(size_t chunk) const { return std::min(total, chunk * size); }
  size_t bytes(size_t chunk) const { return offset(chunk + 1) - offset(chunk); }
};

/// Chunks of whole cache lines: about four of them, none above `largest` nor, where there are
/// several, below `least`.
inline Chunks in_chunks(size_t total, size_t least, size_t largest) {
  return {total, shm::up_to_line(std::clamp((total + 3) / 4, least, std::max(least, largest)))};
}

/// What each rank has for each other, in chunks of `bytes`: those of all ranks travel together.
inline Chunks chunks_of_ranks(size_t bytes, size_t ranks) {
  const size_t largest = std::max<size_t>(64, kChunkBytes / ranks);
  return in_chunks(bytes, std::min<size_t>(largest, 16 << 10), largest);
}

/// The memory of one chunk under way.
struct Stage {
  std::byte* sent = nullptr;
  std::byte* received = nullptr;
  Transfers transfers;
};

/// Of a call; `sent` and `received` in bytes.
inline std::array<Stage, 2> two_stages(Hierarchy& hierarchy, size_t sent, size_t received) {
  const size_t first = shm::up_to_line(sent), all = first + shm::up_to_line(received);
  std::byte* memory = hierarchy.scratch(2 * all);
  return {{{memory, memory + first, {}}, {memory + all, memory + all + first, {}}}};
}

template <class Visit>
void each_other_host(const HostLayout& layout, Visit visit) {
  for (size_t host = 0; host < layout.hosts.size(); ++host)
    if (static_cast<int>(host) != layout.host) visit(host);
}

/// A call with small data, which these functions give, join and take; see SmallData.
template <class Give, class JoinRanks, class JoinHosts, class Take>
void exchange_small(Hierarchy& hierarchy, Give give, JoinRanks join_ranks, JoinHosts join_hosts,
                    Take take) {
  struct Data final : SmallData {
    Data(Give& give, JoinRanks& join_ranks, JoinHosts& join_hosts, Take& take)
        : give_(give), join_ranks_(join_ranks), join_hosts_(join_hosts), take_(take) {}
    void give(std::byte* slot) override { give_(slot); }
    void join_ranks(const Sources& ranks, std::byte* host) override { join_ranks_(ranks, host); }
    void join_hosts(const Sources& hosts, std::byte* to) override { join_hosts_(hosts, to); }
    void take(const std::byte* result) override { take_(result); }
    Give& give_;
    JoinRanks& join_ranks_;
    JoinHosts& join_hosts_;
    Take& take_;
  };
  Data data(give, join_ranks, join_hosts, take);
  hierarchy.exchange(data);
}

}  // namespace lockstep::hierarchical
