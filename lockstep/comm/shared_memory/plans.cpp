#include "lockstep/comm/shared_memory/plans.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "lockstep/base/copy_bytes.h"

namespace lockstep::shm {
namespace {

/// The end of a step's giving: it is resumed when all have arrived.
using AllArrived = std::suspend_always;

/// Below this every rank reduces all of the data: one step in place of two. It reads the data of
/// all ranks for that, so with many of them it pays for less.
constexpr size_t kDirectBytes = 32 << 10;
size_t direct_limit(const SharedGroup& group) {
  return std::min(kDirectBytes / static_cast<size_t>(std::max(1, group.size() / 2)),
                  group.slot_bytes());
}

/// What a rank reduces at a time. A multiple of every element's size.
constexpr size_t kReduceBytes = 8 << 10;

/// `total` bytes in as few pieces of at most `largest` as can be, of about the same size; at least
/// one. All but the last are whole cache lines.
class Pieces {
 public:
  Pieces(size_t total, size_t largest) : total_(total) {
    const size_t count = std::max<size_t>(1, (total + largest - 1) / largest);
    size_ = up_to_line((total + count - 1) / count);
    count_ = size_ == 0 ? 1 : (total + size_ - 1) / size_;
  }
  size_t count() const { return count_; }
  size_t offset(size_t piece) const { return std::min(total_, piece * size_); }
  size_t bytes(size_t piece) const { return offset(piece + 1) - offset(piece); }

 private:
  size_t total_;
  size_t size_ = 0;
  size_t count_ = 1;
};

/// What one rank of `size` has of `total` bytes that all share out.
struct Shard {
  Shard(size_t total, int rank, int size) {
    const auto ranks = static_cast<size_t>(size), index = static_cast<size_t>(rank);
    const size_t each = up_to_line((total + ranks - 1) / ranks);
    begin = std::min(total, index * each);
    end = std::min(total, (index + 1) * each);
  }
  size_t begin, end;
};

/// Where each rank's data lies: this rank's own at `mine`, the others' `offset` bytes into the
/// `bytes` that they gave.
void find_sources(const SharedGroup& group, const std::byte* mine, size_t bytes, size_t offset,
                  std::vector<const void*>& sources) {
  for (int rank = 0; rank < group.size(); ++rank)
    sources[static_cast<size_t>(rank)] =
        rank == group.rank() ? mine : group.given(rank, bytes) + offset;
}

/// Calls `reduce(bytes)` for pieces of `total` that are still in the first-level cache when they
/// are copied, and goes on in each source.
template <class Reduce>
void reduce_in_pieces(size_t total, std::vector<const void*>& sources, const Reduce& reduce) {
  for (size_t bytes = 0; total > 0; total -= bytes) {
    bytes = std::min(total, kReduceBytes);
    reduce(bytes);
    for (auto& source : sources) source = static_cast<const std::byte*>(source) + bytes;
  }
}

/// For data that each rank has for each other: how much of it a slot holds for one.
size_t shard_of_slot(const SharedGroup& group) {
  return group.slot_bytes() / static_cast<size_t>(group.size()) / 64 * 64;
}

/// Every rank that `takes` the result reduces everything.
Plan direct_reduce(SharedGroup& group, std::byte* data, size_t total, ReduceKernel kernel,
                   bool takes) {
  std::vector<const void*> sources(static_cast<size_t>(group.size()));
  copy_bytes(group.give(total), data, total);
  co_await AllArrived();
  if (!takes) co_return;
  find_sources(group, data, total, 0, sources);
  kernel(data, sources.data(), group.size(), total);
}

/// Each rank reduces its part of a block in the step in which the block is given, and puts the
/// result where its own part of the slot lies unused; a step later the parts are collected.
Plan shared_reduce(SharedGroup& group, std::byte* data, size_t total, ReduceKernel kernel,
                   bool takes) {
  const Pieces blocks(total, group.slot_bytes());
  std::vector<const void*> sources(static_cast<size_t>(group.size()));
  for (size_t at = 0; at <= blocks.count(); ++at) {
    const Shard mine(blocks.bytes(at), group.rank(), group.size());
    std::byte* block = data + blocks.offset(at);
    if (at < blocks.count()) {
      std::byte* slot = group.give(group.slot_bytes());
      copy_bytes(slot, block, mine.begin);
      copy_bytes(slot + mine.end, block + mine.end, blocks.bytes(at) - mine.end);
    }
    co_await AllArrived();
    if (mine.begin < mine.end) {
      std::byte* own = block + mine.begin;
      std::byte* result = group.given(group.rank(), group.slot_bytes()) + mine.begin;
      find_sources(group, own, group.slot_bytes(), mine.begin, sources);
      reduce_in_pieces(mine.end - mine.begin, sources, [&](size_t bytes) {
        kernel(takes ? own : result, sources.data(), group.size(), bytes);
        if (takes) copy_bytes(result, own, bytes);
        own += bytes;
        result += bytes;
      });
    }
    if (at == 0 || !takes) continue;
    for (int other = 0; other < group.size(); ++other) {
      if (other == group.rank()) continue;
      const Shard theirs(blocks.bytes(at - 1), other, group.size());
      copy_bytes(data + blocks.offset(at - 1) + theirs.begin,
                 group.given(other, group.slot_bytes(), 1) + theirs.begin,
                 theirs.end - theirs.begin);
    }
  }
}

Plan reducing(SharedGroup& group, std::byte* data, size_t bytes, ReduceKernel kernel, bool takes) {
  return bytes <= direct_limit(group) ? direct_reduce(group, data, bytes, kernel, takes)
                                      : shared_reduce(group, data, bytes, kernel, takes);
}

/// What each rank has for each other. `most`: the largest share of all, on which all agree.
Plan exchange_plan(SharedGroup& group, Buffers sends, Buffers receives, size_t most) {
  const size_t shard = shard_of_slot(group);
  const auto me = static_cast<size_t>(group.rank());
  for (size_t at = 0; at == 0 || at < most; at += shard) {
    const auto piece = [&](std::span<std::byte> all) {
      const size_t begin = std::min(at, all.size());
      return all.subspan(begin, std::min(shard, all.size() - begin));
    };
    std::byte* slot = group.give(group.slot_bytes());
    for (size_t rank = 0; rank < sends.size(); ++rank) {
      const auto part = piece(sends[rank]);
      if (rank != me) copy_bytes(slot + rank * shard, part.data(), part.size());
    }
    co_await AllArrived();
    if (at == 0) copy_bytes(receives[me].data(), sends[me].data(), receives[me].size());
    for (size_t rank = 0; rank < receives.size(); ++rank) {
      const auto part = piece(receives[rank]);
      const std::byte* given = group.given(static_cast<int>(rank), group.slot_bytes());
      if (rank != me) copy_bytes(part.data(), given + me * shard, part.size());
    }
  }
}

/// The largest share that passes between two ranks. From all ranks' sizes of what they send, then
/// of what they receive; none where two do not agree. All check all of it, so that all come to the
/// same result.
std::optional<uint64_t> largest_share(const SharedGroup& group) {
  const auto n = static_cast<size_t>(group.size());
  const auto entry = [&](size_t rank, size_t index) {
    uint64_t value = 0;
    std::memcpy(&value,
                group.given(static_cast<int>(rank), group.slot_bytes()) + index * sizeof(value),
                sizeof(value));
    return value;
  };
  uint64_t most = 0;
  for (size_t from = 0; from < n; ++from) {
    for (size_t to = 0; to < n; ++to) {
      const uint64_t bytes = entry(from, to);
      if (bytes != entry(to, n + from)) return std::nullopt;
      if (from != to) most = std::max(most, bytes);
    }
  }
  return most;
}

}  // namespace

Plan all_reduce_plan(SharedGroup& group, std::byte* data, size_t bytes, ReduceKernel kernel) {
  return reducing(group, data, bytes, kernel, true);
}

// In the first step each rank reduces its share into everyone's memory, and the second tells that
// all have.
Plan all_reduce_plan(SharedGroup& group, const Region& region, size_t offset, size_t bytes,
                     ReduceKernel kernel) {
  co_await AllArrived();
  const Shard mine(bytes, group.rank(), group.size());
  std::vector<const void*> sources;
  for (int rank = 0; rank < group.size(); ++rank)
    sources.push_back(region.part(rank) + offset + mine.begin);
  size_t at = offset + mine.begin;
  reduce_in_pieces(mine.end - mine.begin, sources, [&](size_t piece) {
    std::byte* result = region.mine() + at;
    kernel(result, sources.data(), group.size(), piece);
    for (int rank = 0; rank < group.size(); ++rank)
      if (rank != group.rank()) copy_bytes(region.part(rank) + at, result, piece);
    at += piece;
  });
  co_await AllArrived();
}

bool pays_in_place(const SharedGroup& group, size_t bytes) {
  return bytes > direct_limit(group);
}

Plan reduce_plan(SharedGroup& group, std::byte* data, size_t bytes, ReduceKernel kernel, int root) {
  return reducing(group, data, bytes, kernel, group.rank() == root);
}

Plan broadcast_plan(SharedGroup& group, std::byte* data, size_t total, int root) {
  const Pieces pieces(total, group.slot_bytes());
  for (size_t at = 0; at < pieces.count(); ++at) {
    std::byte* piece = data + pieces.offset(at);
    const size_t bytes = pieces.bytes(at);
    if (group.rank() == root) copy_bytes(group.give(bytes), piece, bytes);
    co_await AllArrived();
    if (group.rank() != root) copy_bytes(piece, group.given(root, bytes), bytes);
  }
}

Plan all_gather_plan(SharedGroup& group, const std::byte* input, size_t total,
                     std::vector<std::byte*> outputs) {
  const Pieces pieces(total, group.slot_bytes());
  for (size_t at = 0; at < pieces.count(); ++at) {
    const std::byte* mine = input + pieces.offset(at);
    const size_t bytes = pieces.bytes(at);
    copy_bytes(group.give(bytes), mine, bytes);
    co_await AllArrived();
    for (size_t rank = 0; rank < outputs.size(); ++rank) {
      const auto of = static_cast<int>(rank);
      copy_bytes(outputs[rank] + pieces.offset(at),
                 of == group.rank() ? mine : group.given(of, bytes), bytes);
    }
  }
}

Plan scatter_plan(SharedGroup& group, const std::vector<const std::byte*>& inputs,
                  std::byte* output, size_t bytes, int root) {
  Buffers sends(static_cast<size_t>(group.size())), receives(sends.size());
  for (size_t rank = 0; group.rank() == root && rank < inputs.size(); ++rank)
    sends[rank] = {const_cast<std::byte*>(inputs[rank]), bytes};
  receives[static_cast<size_t>(root)] = {output, bytes};
  return exchange_plan(group, std::move(sends), std::move(receives), bytes);
}

Plan reduce_scatter_plan(SharedGroup& group, std::vector<const std::byte*> inputs,
                         std::byte* output, size_t total, ReduceKernel kernel) {
  const size_t shard = shard_of_slot(group);
  const Pieces pieces(total, shard);
  const auto me = static_cast<size_t>(group.rank());
  std::vector<const void*> sources(inputs.size());
  for (size_t piece = 0; piece < pieces.count(); ++piece) {
    const size_t at = pieces.offset(piece), bytes = pieces.bytes(piece);
    std::byte* slot = group.give(group.slot_bytes());
    for (size_t rank = 0; rank < inputs.size(); ++rank)
      if (rank != me) copy_bytes(slot + rank * shard, inputs[rank] + at, bytes);
    co_await AllArrived();
    find_sources(group, inputs[me] + at, group.slot_bytes(), me * shard, sources);
    kernel(output + at, sources.data(), group.size(), bytes);
  }
}

// In the first step all have written their parts, and each rank reduces. The second tells that all
// have.
Plan reduce_scatter_plan(SharedGroup& group, const Region& region, size_t offset, std::byte* output,
                         size_t bytes, ReduceKernel kernel) {
  co_await AllArrived();
  std::vector<const void*> sources;
  for (int rank = 0; rank < group.size(); ++rank)
    sources.push_back(region.part(rank) + offset + static_cast<size_t>(group.rank()) * bytes);
  kernel(output, sources.data(), group.size(), bytes);
  co_await AllArrived();
}

// The first step tells everyone how much passes between any two ranks, and so how many follow.
Plan all_to_all_plan(SharedGroup& group, const Call& call, Buffers sends, Buffers receives,
                     std::chrono::milliseconds timeout) {
  std::byte* slot = group.give(group.slot_bytes());
  for (const auto* buffers : {&sends, &receives}) {
    for (const auto& buffer : *buffers) {
      const uint64_t bytes = buffer.size();
      slot = std::copy_n(reinterpret_cast<const std::byte*>(&bytes), sizeof(bytes), slot);
    }
  }
  co_await AllArrived();
  const auto most = largest_share(group);
  if (!most) group.differ(call, timeout);
  Plan rest = exchange_plan(group, std::move(sends), std::move(receives), *most);
  while (rest.next()) co_await AllArrived();
}

Plan sequence_plan(std::vector<Plan> plans) {
  if (plans.empty()) co_await AllArrived();
  for (auto& plan : plans)
    while (plan.next()) co_await AllArrived();
}

void start(SharedGroup& group, const Call& call, Plan& plan) {
  group.begin(call);
  plan.next();
  group.arrive();
}

void finish(SharedGroup& group, const Call& call, Plan& plan, std::chrono::milliseconds timeout,
            Waiter waiter) {
  group.await(call, timeout, waiter);
  group.compare(call, timeout);
  while (plan.next()) {
    group.arrive();
    group.await(call, timeout, waiter);
  }
}

}  // namespace lockstep::shm
