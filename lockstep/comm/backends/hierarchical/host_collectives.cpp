#include "lockstep/comm/backends/hierarchical/host_collectives.h"

#include <algorithm>
#include <array>
#include <optional>

#include "lockstep/base/copy_bytes.h"
#include "lockstep/comm/shared_memory/memory.h"

namespace lockstep::hierarchical {
namespace {

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
Chunks in_chunks(size_t total, size_t least, size_t largest) {
  return {total, shm::up_to_line(std::clamp((total + 3) / 4, least, std::max(least, largest)))};
}

/// What each rank has for each other, in chunks of `bytes`: those of all ranks travel together.
Chunks chunks_of_ranks(size_t bytes, size_t ranks) {
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
std::array<Stage, 2> two_stages(Hierarchy& hierarchy, size_t sent, size_t received) {
  const size_t first = shm::up_to_line(sent), all = first + shm::up_to_line(received);
  std::byte* memory = hierarchy.scratch(2 * all);
  return {{{memory, memory + first, {}}, {memory + all, memory + all + first, {}}}};
}

/// Of bytes that one rank has, while the others have zeros.
Joining of_one_rank() {
  return {shm::reduce_kernel(shm::DataType::u8, shm::Reduction::bor)};
}

// Begins a call of large data; nothing is done where this host's calls differ.
template <class Local>
void agree_over(Hierarchy& hierarchy, Local local) {
  if (hierarchy.begin()) local();
  hierarchy.conclude();
}

// --- all_reduce ---------------------------------------------------------------------------------

/// A leader's part of an all_reduce between the hosts: each shares the sum out in parts, one a
/// host, and hands its part to the others when it has it. Of two hosts each takes the whole: that
/// moves as many bytes, in one step instead of two. Chunks go through post, advance and finish in
/// this order, and up to three are under way, at different stages.
class HostReduce {
 public:
  HostReduce(Hierarchy& hierarchy, std::byte* data, const Chunks& chunks, const Joining& joining)
      : hierarchy_(hierarchy),
        data_(data),
        chunks_(chunks),
        joining_(joining),
        hosts_(hierarchy.layout().hosts.size()),
        me_(static_cast<size_t>(hierarchy.layout().host)) {
    const size_t largest = std::min(chunks.total, chunks.size);
    const size_t each = hosts_ == 2 ? shm::up_to_line(largest) : part_size(largest);
    const size_t used = std::min(kStages, chunks.count());
    std::byte* memory = hierarchy.scratch(used * (hosts_ - 1) * each);
    for (size_t k = 0; k < used; ++k) stages_[k].received = memory + k * (hosts_ - 1) * each;
  }

  void post(size_t chunk) {
    Stage& stage = stages_[chunk % kStages];
    std::byte* start = data_ + chunks_.offset(chunk);
    const Part mine = part(chunk, me_);
    each_other_host(hierarchy_.layout(), [&](size_t host) {
      const Part theirs = part(chunk, host);
      hierarchy_.receive(static_cast<int>(host), received(stage, mine, host), mine.bytes,
                         stage.transfers);
      hierarchy_.send(static_cast<int>(host), start + theirs.begin, theirs.bytes, stage.transfers);
    });
  }

  void advance(size_t chunk) {
    Stage& stage = stages_[chunk % kStages];
    hierarchy_.finish(stage.transfers);
    const Part mine = part(chunk, me_);
    std::byte* start = data_ + chunks_.offset(chunk);
    std::vector<const std::byte*> sources;
    for (size_t host = 0; host < hosts_; ++host)
      sources.push_back(host == me_ ? start + mine.begin : received(stage, mine, host));
    joining_.join(sources, start + mine.begin, mine.bytes);
    joining_.finish(start + mine.begin, mine.bytes);
    if (hosts_ == 2) return;
    each_other_host(hierarchy_.layout(), [&](size_t host) {
      const Part theirs = part(chunk, host);
      hierarchy_.receive(static_cast<int>(host), start + theirs.begin, theirs.bytes,
                         stage.transfers);
      hierarchy_.send(static_cast<int>(host), start + mine.begin, mine.bytes, stage.transfers);
    });
  }

  void finish(size_t chunk) { hierarchy_.finish(stages_[chunk % kStages].transfers); }

 private:
  static constexpr size_t kStages = 3;
  struct Part {
    size_t begin, bytes;
  };
  size_t part_size(size_t bytes) const { return shm::up_to_line((bytes + hosts_ - 1) / hosts_); }
  Part part(size_t chunk, size_t host) const {
    const size_t bytes = chunks_.bytes(chunk);
    if (hosts_ == 2) return {0, bytes};
    const size_t each = part_size(bytes);
    const size_t begin = std::min(bytes, host * each);
    return {begin, std::min(bytes, begin + each) - begin};
  }
  std::byte* received(const Stage& stage, const Part& mine, size_t host) const {
    return stage.received + (host < me_ ? host : host - 1) * mine.bytes;
  }

  Hierarchy& hierarchy_;
  std::byte* data_;
  const Chunks chunks_;
  const Joining& joining_;
  const size_t hosts_;
  const size_t me_;
  std::array<Stage, kStages> stages_;
};

void reduce_piece(Hierarchy& hierarchy, std::byte* data, const Chunks& chunks, size_t chunk,
                  const Joining& joining) {
  hierarchy.run_local(shm::reduce_plan(hierarchy.local(), data + chunks.offset(chunk),
                                       chunks.bytes(chunk), joining.kernel, 0));
}

void large_all_reduce(Hierarchy& hierarchy, std::byte* data, size_t bytes, const Joining& joining) {
  const Chunks chunks = in_chunks(bytes, kLeastChunkBytes, kChunkBytes);
  const bool leads = hierarchy.layout().leads();
  std::optional<HostReduce> between;
  if (leads) between.emplace(hierarchy, data, chunks, joining);
  agree_over(hierarchy, [&] { reduce_piece(hierarchy, data, chunks, 0, joining); });
  const size_t count = chunks.count();
  for (size_t turn = 0; turn < count + 2; ++turn) {
    if (turn > 0 && turn < count) reduce_piece(hierarchy, data, chunks, turn, joining);
    if (leads && turn < count) between->post(turn);
    if (leads && turn > 0 && turn <= count) between->advance(turn - 1);
    if (turn < 2) continue;
    const size_t done = turn - 2;
    if (leads) between->finish(done);
    hierarchy.run_local(
        shm::broadcast_plan(hierarchy.local(), data + chunks.offset(done), chunks.bytes(done), 0));
  }
}

// --- broadcast ----------------------------------------------------------------------------------

/// A host's node in the binomial tree over `hosts` hosts from `root`: from whom it gets (-1 at the
/// root), and to whom it passes on.
struct TreeNode {
  int parent = -1;
  std::vector<int> children;
};

TreeNode tree_node(int host, int root, int hosts) {
  const auto real = [&](int index) { return (index + root) % hosts; };
  const int index = (host - root + hosts) % hosts;
  int lowest = 1;  // The lowest set bit of the index; for the root the first power above all.
  while (lowest < hosts && (index & lowest) == 0) lowest *= 2;
  TreeNode node;
  if (index != 0) node.parent = real(index - lowest);
  for (int bit = lowest / 2; bit > 0; bit /= 2)
    if (index + bit < hosts) node.children.push_back(real(index + bit));
  return node;
}

void large_broadcast(Hierarchy& hierarchy, std::byte* data, size_t bytes, int root) {
  const HostLayout& layout = hierarchy.layout();
  const Chunks chunks = in_chunks(bytes, kLeastChunkBytes, kChunkBytes);
  const int host = layout.host_of[static_cast<size_t>(root)];
  const bool first = layout.host == host;
  const TreeNode node = tree_node(layout.host, host, static_cast<int>(layout.hosts.size()));
  Transfers sends;
  std::array<Transfers, 2> receives;
  const auto receive = [&](size_t chunk) {
    if (layout.leads() && !first && chunk < chunks.count())
      hierarchy.receive(node.parent, data + chunks.offset(chunk), chunks.bytes(chunk),
                        receives[chunk % 2]);
  };
  const auto local = [&](size_t chunk) {
    hierarchy.run_local(shm::broadcast_plan(hierarchy.local(), data + chunks.offset(chunk),
                                            chunks.bytes(chunk),
                                            first ? layout.local_of(root) : 0));
  };
  agree_over(hierarchy, [&] {
    if (first) local(0);
  });
  receive(0);
  for (size_t chunk = 0; chunk < chunks.count(); ++chunk) {
    receive(chunk + 1);
    if (first && chunk > 0) local(chunk);
    if (layout.leads()) {
      if (!first) hierarchy.finish(receives[chunk % 2]);
      for (const int child : node.children)
        hierarchy.send(child, data + chunks.offset(chunk), chunks.bytes(chunk), sends);
    }
    if (!first) local(chunk);
  }
  if (layout.leads()) hierarchy.finish(sends);
}

// --- all_gather and reduce_scatter --------------------------------------------------------------

/// Puts the blocks of `ranks`, `bytes` at `offset` of each one's, one after the other; returns
/// where they end.
template <class Block>
std::byte* put_together(std::byte* to, const std::vector<int>& ranks,
                        const std::vector<Block*>& blocks, size_t offset, size_t bytes) {
  for (const int rank : ranks) {
    copy_bytes(to, blocks[static_cast<size_t>(rank)] + offset, bytes);
    to += bytes;
  }
  return to;
}

/// A call in chunks: while one is `post`ed between the leaders, the next is made on the hosts by
/// `local` and the one before handed out.
template <class Local, class Post, class HandOut>
void pipeline(Hierarchy& hierarchy, const Chunks& chunks, Local local, Post post,
              HandOut hand_out) {
  const bool leads = hierarchy.layout().leads();
  agree_over(hierarchy, [&] { local(0); });
  for (size_t turn = 0; turn <= chunks.count(); ++turn) {
    if (turn > 0 && turn < chunks.count()) local(turn);
    if (leads && turn < chunks.count()) post(turn);
    if (turn > 0) hand_out(turn - 1);
  }
}

void large_all_gather(Hierarchy& hierarchy, const std::byte* input, size_t bytes,
                      const std::vector<std::byte*>& outputs) {
  const HostLayout& layout = hierarchy.layout();
  const auto& mine = layout.mine();
  const size_t others = outputs.size() - mine.size();
  const Chunks chunks = chunks_of_ranks(bytes, outputs.size());
  const size_t most = std::min(bytes, chunks.size);
  auto stages = two_stages(hierarchy, mine.size() * most, others * most);
  const auto gather_local = [&](size_t chunk) {
    std::vector<std::byte*> targets;
    for (const int rank : mine)
      targets.push_back(outputs[static_cast<size_t>(rank)] + chunks.offset(chunk));
    hierarchy.run_local(shm::all_gather_plan(hierarchy.local(), input + chunks.offset(chunk),
                                             chunks.bytes(chunk), std::move(targets)));
  };
  const auto post = [&](size_t chunk) {
    Stage& stage = stages[chunk % 2];
    const size_t each = chunks.bytes(chunk);
    put_together(stage.sent, mine, outputs, chunks.offset(chunk), each);
    std::byte* to = stage.received;
    each_other_host(layout, [&](size_t host) {
      const size_t theirs = layout.hosts[host].size() * each;
      hierarchy.receive(static_cast<int>(host), to, theirs, stage.transfers);
      hierarchy.send(static_cast<int>(host), stage.sent, mine.size() * each, stage.transfers);
      to += theirs;
    });
  };
  const auto hand_out = [&](size_t chunk) {
    Stage& stage = stages[chunk % 2];
    if (layout.leads()) hierarchy.finish(stage.transfers);
    const size_t each = chunks.bytes(chunk);
    hierarchy.run_local(shm::broadcast_plan(hierarchy.local(), stage.received, others * each, 0));
    const std::byte* from = stage.received;
    each_other_host(layout, [&](size_t host) {
      for (const int rank : layout.hosts[host]) {
        copy_bytes(outputs[static_cast<size_t>(rank)] + chunks.offset(chunk), from, each);
        from += each;
      }
    });
  };
  pipeline(hierarchy, chunks, gather_local, post, hand_out);
}

void large_reduce_scatter(Hierarchy& hierarchy, const std::vector<const std::byte*>& inputs,
                          std::byte* output, size_t bytes, const Joining& joining) {
  const HostLayout& layout = hierarchy.layout();
  const auto& mine = layout.mine();
  const size_t hosts = layout.hosts.size(), me = static_cast<size_t>(layout.host);
  const Chunks chunks = chunks_of_ranks(bytes, inputs.size());
  std::vector<size_t> first(1, 0);  // Of each host's ranks, how many come before them.
  for (const auto& host : layout.hosts) first.push_back(first.back() + host.size());
  const size_t most = std::min(bytes, chunks.size);
  // Sent are the blocks for each rank, by host: this rank's own, on the leader the sum of its
  // host's. Received are those for the ranks of this host, from each host.
  auto stages =
      two_stages(hierarchy, inputs.size() * most, layout.leads() ? hosts * mine.size() * most : 0);
  const auto reduce_local = [&](size_t chunk) {
    Stage& stage = stages[chunk % 2];
    const size_t each = chunks.bytes(chunk);
    std::byte* to = stage.sent;
    for (const auto& host : layout.hosts)
      to = put_together(to, host, inputs, chunks.offset(chunk), each);
    hierarchy.run_local(
        shm::reduce_plan(hierarchy.local(), stage.sent, inputs.size() * each, joining.kernel, 0));
  };
  const auto post = [&](size_t chunk) {
    Stage& stage = stages[chunk % 2];
    const size_t each = chunks.bytes(chunk), share = mine.size() * each;
    each_other_host(layout, [&](size_t host) {
      hierarchy.receive(static_cast<int>(host), stage.received + host * share, share,
                        stage.transfers);
      hierarchy.send(static_cast<int>(host), stage.sent + first[host] * each,
                     layout.hosts[host].size() * each, stage.transfers);
    });
  };
  const auto hand_out = [&](size_t chunk) {
    Stage& stage = stages[chunk % 2];
    const size_t each = chunks.bytes(chunk), share = mine.size() * each;
    std::byte* own = stage.sent + first[me] * each;
    if (layout.leads()) {
      hierarchy.finish(stage.transfers);
      std::vector<const std::byte*> sources;
      for (size_t host = 0; host < hosts; ++host)
        sources.push_back(host == me ? own : stage.received + host * share);
      joining.join(sources, own, share);
      joining.finish(own, share);
    }
    std::vector<const std::byte*> parts;
    for (size_t k = 0; k < mine.size(); ++k) parts.push_back(own + k * each);
    hierarchy.run_local(shm::scatter_plan(hierarchy.local(), std::move(parts),
                                          output + chunks.offset(chunk), each, 0));
  };
  pipeline(hierarchy, chunks, reduce_local, post, hand_out);
}

}  // namespace

void barrier(Hierarchy& hierarchy) {
  hierarchy.exchange({});
}

void all_reduce(Hierarchy& hierarchy, std::byte* data, size_t bytes, const Joining& joining) {
  if (bytes > SmallData::kMost) return large_all_reduce(hierarchy, data, bytes, joining);
  hierarchy.exchange({data, bytes, joining});
}

void broadcast(Hierarchy& hierarchy, std::byte* data, size_t bytes, int root) {
  if (bytes > SmallData::kMost) return large_broadcast(hierarchy, data, bytes, root);
  const bool is_root = hierarchy.layout().rank() == root;
  std::vector<std::byte> small(bytes);
  if (is_root) copy_bytes(small.data(), data, bytes);
  hierarchy.exchange({small.data(), bytes, of_one_rank()});
  if (!is_root) copy_bytes(data, small.data(), bytes);
}

void all_gather(Hierarchy& hierarchy, const std::byte* input, size_t bytes,
                const std::vector<std::byte*>& outputs) {
  const auto& layout = hierarchy.layout();
  const size_t all_bytes = layout.size() * bytes;
  if (!outputs.empty() && all_bytes > SmallData::kMost)
    return large_all_gather(hierarchy, input, bytes, outputs);
  std::vector<std::byte> all(all_bytes);
  copy_bytes(all.data() + static_cast<size_t>(layout.rank()) * bytes, input, bytes);
  hierarchy.exchange({all.data(), all_bytes, of_one_rank()});
  for (size_t rank = 0; rank < outputs.size(); ++rank)
    copy_bytes(outputs[rank], all.data() + rank * bytes, bytes);
}

void reduce_scatter(Hierarchy& hierarchy, const std::vector<const std::byte*>& inputs,
                    std::byte* output, size_t bytes, const Joining& joining) {
  const size_t all = inputs.size() * bytes;
  if (all > SmallData::kMost)
    return large_reduce_scatter(hierarchy, inputs, output, bytes, joining);
  std::vector<std::byte> sum(all);
  for (size_t rank = 0; rank < inputs.size(); ++rank)
    copy_bytes(sum.data() + rank * bytes, inputs[rank], bytes);
  all_reduce(hierarchy, sum.data(), all, joining);
  const auto me = static_cast<size_t>(hierarchy.layout().rank());
  copy_bytes(output, sum.data() + me * bytes, bytes);
}

}  // namespace lockstep::hierarchical
