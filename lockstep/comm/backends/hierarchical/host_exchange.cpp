// gather, scatter and all_to_all: what one rank has for another goes to that one only.
#include <functional>
#include <utility>

#include "lockstep/base/copy_bytes.h"
#include "lockstep/comm/backends/hierarchical/collective_parts.h"

namespace lockstep::hierarchical {
namespace {

using shm::Share;
using shm::Shares;

/// How many bytes `from` has for `to`. All ranks know it of all.
using Sizes = std::function<size_t(int from, int to)>;

/// Moves it. Ranks of one host reach each other in shared memory. What is for other hosts goes
/// through the leaders, in chunks: while one is under way, the next is collected.
class Exchange {
 public:
  Exchange(Hierarchy& hierarchy, Sizes sizes, Shares sends, Shares receives)
      : hierarchy_(hierarchy),
        layout_(hierarchy.layout()),
        sizes_(std::move(sizes)),
        sends_(std::move(sends)),
        receives_(std::move(receives)),
        me_(layout_.mine()[static_cast<size_t>(layout_.local)]),
        chunks_(chunks_of_ranks(most_between_hosts(), sends_.size())) {
    const size_t sent = layout_.leads() ? total_sent(0) : sent_by(me_, 0);
    const size_t received = layout_.leads() ? 2 * total_received(0) : received_by(me_, 0);
    stages_ = two_stages(hierarchy_, sent, received);
  }

  void run() {
    const size_t count = chunks_.count();
    for (size_t turn = 0; turn <= count; ++turn) {
      if (turn < count) collect(turn);
      if (turn == 0) exchange_on_host();
      if (turn > 0) hand_out(turn - 1);
    }
  }

 private:
  struct Piece {
    size_t at, bytes;
  };
  /// What `from` has for `to`, as far as it belongs to the chunk.
  Piece piece(int from, int to, size_t chunk) const {
    const size_t all = sizes_(from, to), at = std::min(all, chunk * chunks_.size);
    return {at, std::min(all - at, chunks_.size)};
  }

  template <class Visit>
  void each_remote_rank(Visit visit) const {
    each_other_host(layout_, [&](size_t host) {
      for (const int rank : layout_.hosts[host]) visit(rank);
    });
  }
  size_t most_between_hosts() const {
    // All hosts must come to the same number, so all pairs count.
    size_t most = 0;
    for (const auto& from : layout_.hosts)
      for (const auto& to : layout_.hosts) {
        if (&from == &to) continue;
        for (const int one : from)
          for (const int other : to) most = std::max(most, sizes_(one, other));
      }
    return most;
  }
  size_t sent_by(int rank, size_t chunk) const {
    size_t bytes = 0;
    each_remote_rank([&](int other) { bytes += piece(rank, other, chunk).bytes; });
    return bytes;
  }
  size_t received_by(int rank, size_t chunk) const {
    size_t bytes = 0;
    each_remote_rank([&](int other) { bytes += piece(other, rank, chunk).bytes; });
    return bytes;
  }
  size_t total_sent(size_t chunk) const {
    size_t bytes = 0;
    for (const int rank : layout_.mine()) bytes += sent_by(rank, chunk);
    return bytes;
  }
  size_t total_received(size_t chunk) const {
    size_t bytes = 0;
    for (const int rank : layout_.mine()) bytes += received_by(rank, chunk);
    return bytes;
  }
  /// Of the chunk, from a rank to all of a host.
  size_t between(int from, const std::vector<int>& host, size_t chunk) const {
    size_t bytes = 0;
    for (const int to : host) bytes += piece(from, to, chunk).bytes;
    return bytes;
  }

  /// A step or several on this host: `sends` and `receives` by the host's ranks.
  void move_on_host(Shares sends, Shares receives) {
    hierarchy_.run_local(hierarchy_.all_to_all_plan(std::move(sends), std::move(receives)));
  }

  void exchange_on_host() {
    Shares sends, receives;
    for (const int rank : layout_.mine()) {
      sends.push_back(sends_[static_cast<size_t>(rank)]);
      receives.push_back(receives_[static_cast<size_t>(rank)]);
    }
    move_on_host(std::move(sends), std::move(receives));
  }

  /// Brings what this host has for others to its leader, which sends it: by the ranks that give it,
  /// and of each by the ranks that get it.
  void collect(size_t chunk) {
    Stage& stage = stages_[chunk % 2];
    const size_t ranks = layout_.mine().size();
    if (total_sent(chunk) > 0) {
      std::byte* to = stage.sent;
      each_remote_rank([&](int rank) {
        const Piece part = piece(me_, rank, chunk);
        copy_bytes(to, sends_[static_cast<size_t>(rank)].data + part.at, part.bytes);
        to += part.bytes;
      });
      Shares sends(ranks), receives(ranks);
      if (!layout_.leads()) sends[0] = {stage.sent, sent_by(me_, chunk)};
      if (layout_.leads()) {
        for (size_t k = 1; k < ranks; ++k) {
          receives[k] = {to, sent_by(layout_.mine()[k], chunk)};
          to += receives[k].bytes;
        }
      }
      move_on_host(std::move(sends), std::move(receives));
    }
    if (layout_.leads()) post(chunk);
  }

  void post(size_t chunk) {
    Stage& stage = stages_[chunk % 2];
    std::byte* to = stage.received;
    each_other_host(layout_, [&](size_t host) {
      for (const int from : layout_.hosts[host]) {
        const size_t bytes = between(from, layout_.mine(), chunk);
        hierarchy_.receive(static_cast<int>(host), to, bytes, stage.transfers);
        to += bytes;
      }
    });
    const std::byte* from = stage.sent;
    for (const int rank : layout_.mine()) {
      each_other_host(layout_, [&](size_t host) {
        const size_t bytes = between(rank, layout_.hosts[host], chunk);
        hierarchy_.send(static_cast<int>(host), from, bytes, stage.transfers);
        from += bytes;
      });
    }
  }

  void hand_out(size_t chunk) {
    Stage& stage = stages_[chunk % 2];
    if (layout_.leads()) hierarchy_.finish(stage.transfers);
    if (total_received(chunk) == 0) return;
    const size_t ranks = layout_.mine().size();
    Shares sends(ranks), receives(ranks);
    const std::byte* mine = stage.received;
    if (layout_.leads()) {
      sends = sorted(stage, chunk);
      mine = std::exchange(sends[0], Share{}).data;
    } else {
      receives[0] = {stage.received, received_by(me_, chunk)};
    }
    move_on_host(std::move(sends), std::move(receives));
    each_remote_rank([&](int rank) {
      const Piece part = piece(rank, me_, chunk);
      copy_bytes(receives_[static_cast<size_t>(rank)].data + part.at, mine, part.bytes);
      mine += part.bytes;
    });
  }

  /// On a leader: what came from the others, by the ranks of this host that get it.
  Shares sorted(Stage& stage, size_t chunk) const {
    Shares parts;
    std::byte* at = stage.received + total_received(chunk);
    for (const int rank : layout_.mine()) {
      parts.push_back({at, 0});
      at += received_by(rank, chunk);
    }
    const std::byte* from = stage.received;
    each_remote_rank([&](int sender) {
      for (size_t k = 0; k < parts.size(); ++k) {
        const size_t bytes = piece(sender, layout_.mine()[k], chunk).bytes;
        copy_bytes(parts[k].data + parts[k].bytes, from, bytes);
        parts[k].bytes += bytes;
        from += bytes;
      }
    });
    return parts;
  }

  Hierarchy& hierarchy_;
  const HostLayout& layout_;
  const Sizes sizes_;
  const Shares sends_;
  const Shares receives_;
  const int me_;
  const Chunks chunks_;
  std::array<Stage, 2> stages_;
};

/// The root's memory of one block per rank; nothing on the other ranks.
Shares shares_of_root(size_t ranks, const std::vector<std::byte*>& blocks, size_t bytes) {
  Shares shares(ranks);
  for (size_t rank = 0; rank < blocks.size(); ++rank) shares[rank] = {blocks[rank], bytes};
  return shares;
}

void agree(Hierarchy& hierarchy) {
  hierarchy.begin();
  hierarchy.conclude();
}

size_t ranks_of(const HostLayout& layout) {
  size_t ranks = 0;
  for (const auto& host : layout.hosts) ranks += host.size();
  return ranks;
}

}  // namespace

void gather(Hierarchy& hierarchy, const std::byte* input, size_t bytes,
            const std::vector<std::byte*>& outputs, int root) {
  const size_t ranks = ranks_of(hierarchy.layout());
  if (ranks * bytes <= SmallData::kMost) return all_gather(hierarchy, input, bytes, outputs);
  agree(hierarchy);
  Shares sends(ranks);
  sends[static_cast<size_t>(root)] = {const_cast<std::byte*>(input), bytes};
  const auto sizes = [=](int, int to) { return to == root ? bytes : 0; };
  Exchange(hierarchy, sizes, std::move(sends), shares_of_root(ranks, outputs, bytes)).run();
}

void scatter(Hierarchy& hierarchy, const std::vector<std::byte*>& inputs, std::byte* output,
             size_t bytes, int root) {
  const HostLayout& layout = hierarchy.layout();
  const size_t ranks = ranks_of(layout);
  const auto me = static_cast<size_t>(layout.mine()[static_cast<size_t>(layout.local)]);
  if (ranks * bytes <= SmallData::kMost) {
    std::vector<std::byte> all(ranks * bytes);
    for (size_t rank = 0; rank < inputs.size(); ++rank)
      copy_bytes(all.data() + rank * bytes, inputs[rank], bytes);
    broadcast(hierarchy, all.data(), all.size(), root);
    return copy_bytes(output, all.data() + me * bytes, bytes);
  }
  agree(hierarchy);
  Shares receives(ranks);
  receives[static_cast<size_t>(root)] = {output, bytes};
  const auto sizes = [=](int from, int) { return from == root ? bytes : 0; };
  Exchange(hierarchy, sizes, shares_of_root(ranks, inputs, bytes), std::move(receives)).run();
}

// First all tell all how much passes between any two ranks: all check all of it, so that all come
// to the same verdict.
void all_to_all(Hierarchy& hierarchy, const Shares& sends, const Shares& receives) {
  const size_t ranks = sends.size();
  std::vector<uint64_t> mine;
  for (const auto* shares : {&sends, &receives})
    for (const Share& share : *shares) mine.push_back(share.bytes);
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
  const auto sizes = [&](int from, int to) {
    return static_cast<size_t>(sent(static_cast<size_t>(from), static_cast<size_t>(to)));
  };
  Exchange(hierarchy, sizes, sends, receives).run();
}

}  // namespace lockstep::hierarchical
