// gather, scatter and all_to_all: what one rank has for another goes to that one only.
#include <ATen/ATen.h>

#include <climits>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/base/copy_bytes.h"
#include "lockstep/comm/backends/hierarchical/host_collectives.h"

namespace lockstep::hierarchical {
namespace {

using shm::Buffers;

/// Of messages in the flat group that are no program's.
constexpr int kTag = INT_MAX - 1;

/// Ranks of one host reach each other in shared memory, those of different hosts by the flat group.
/// All know already that they agree on the sizes. What passes between hosts has the group's
/// time-out.
void exchange(Hierarchy& hierarchy, c10d::Backend& flat, const Buffers& sends,
              const Buffers& receives) {
  const HostLayout& layout = hierarchy.layout();
  std::vector<c10::intrusive_ptr<c10d::Work>> under_way;
  const auto bytes_in = [](std::span<std::byte> buffer) {
    return std::vector<at::Tensor>{
        at::from_blob(buffer.data(), {static_cast<int64_t>(buffer.size())}, at::kByte)};
  };
  each_other_host(layout, [&](size_t host) {
    for (const int rank : layout.hosts[host]) {
      const auto to = sends[static_cast<size_t>(rank)], from = receives[static_cast<size_t>(rank)];
      auto in = bytes_in(from), out = bytes_in(to);
      if (!from.empty()) under_way.push_back(flat.recv(in, rank, kTag));
      if (!to.empty()) under_way.push_back(flat.send(out, rank, kTag));
    }
  });
  Buffers mine_out, mine_in;
  for (const int rank : layout.mine()) {
    mine_out.push_back(sends[static_cast<size_t>(rank)]);
    mine_in.push_back(receives[static_cast<size_t>(rank)]);
  }
  hierarchy.run_local(hierarchy.all_to_all_plan(std::move(mine_out), std::move(mine_in)));
  for (const auto& work : under_way) work->wait(kNoTimeout);
}

/// The root's memory of one block per rank; nothing on the other ranks.
Buffers buffers_of_root(size_t ranks, const std::vector<std::byte*>& blocks, size_t bytes) {
  Buffers buffers(ranks);
  for (size_t rank = 0; rank < blocks.size(); ++rank) buffers[rank] = {blocks[rank], bytes};
  return buffers;
}

}  // namespace

void gather(Hierarchy& hierarchy, c10d::Backend& flat, const std::byte* input, size_t bytes,
            const std::vector<std::byte*>& outputs, int root) {
  const size_t ranks = hierarchy.layout().size();
  if (ranks * bytes <= SmallData::kMost) return all_gather(hierarchy, input, bytes, outputs);
  hierarchy.begin();
  hierarchy.conclude();
  Buffers sends(ranks);
  sends[static_cast<size_t>(root)] = {const_cast<std::byte*>(input), bytes};
  exchange(hierarchy, flat, sends, buffers_of_root(ranks, outputs, bytes));
}

void scatter(Hierarchy& hierarchy, c10d::Backend& flat, const std::vector<std::byte*>& inputs,
             std::byte* output, size_t bytes, int root) {
  const size_t ranks = hierarchy.layout().size();
  const auto me = static_cast<size_t>(hierarchy.layout().rank());
  if (ranks * bytes <= SmallData::kMost) {
    std::vector<std::byte> all(ranks * bytes);
    for (size_t rank = 0; rank < inputs.size(); ++rank)
      copy_bytes(all.data() + rank * bytes, inputs[rank], bytes);
    broadcast(hierarchy, all.data(), all.size(), root);
    return copy_bytes(output, all.data() + me * bytes, bytes);
  }
  hierarchy.begin();
  hierarchy.conclude();
  Buffers receives(ranks);
  receives[static_cast<size_t>(root)] = {output, bytes};
  exchange(hierarchy, flat, buffers_of_root(ranks, inputs, bytes), receives);
}

// First all tell all how much passes between any two ranks: all check all of it, so that all come
// to the same result.
void all_to_all(Hierarchy& hierarchy, c10d::Backend& flat, const Buffers& sends,
                const Buffers& receives) {
  const size_t ranks = sends.size();
  std::vector<uint64_t> mine;
  for (const auto* buffers : {&sends, &receives})
    for (const auto& buffer : *buffers) mine.push_back(buffer.size());
  std::vector<uint64_t> table(ranks * mine.size());
  std::vector<std::byte*> rows;
  for (size_t rank = 0; rank < ranks; ++rank)
    rows.push_back(reinterpret_cast<std::byte*>(&table[rank * mine.size()]));
  all_gather(hierarchy, reinterpret_cast<const std::byte*>(mine.data()),
             mine.size() * sizeof(uint64_t), rows);
  const auto sent = [&](size_t from, size_t to) { return table[from * 2 * ranks + to]; };
  for (size_t from = 0; from < ranks; ++from)
    for (size_t to = 0; to < ranks; ++to)
      if (sent(from, to) != table[to * 2 * ranks + ranks + from]) hierarchy.differ();
  exchange(hierarchy, flat, sends, receives);
}

}  // namespace lockstep::hierarchical
