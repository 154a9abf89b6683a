#include "lockstep/comm/shared_memory/plans.h"

#include <algorithm>
#include <cstring>

#include "lockstep/base/copy_bytes.h"

namespace lockstep::shm {
namespace {

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
    count_ = size_ == 0 ? 1 : static_cast<int64_t>((total + size_ - 1) / size_);
  }
  int64_t count() const { return count_; }
  size_t offset(int64_t piece) const {
    return std::min(total_, static_cast<size_t>(piece) * size_);
  }
  size_t bytes(int64_t piece) const { return offset(piece + 1) - offset(piece); }

 private:
  size_t total_;
  size_t size_ = 0;
  int64_t count_ = 1;
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

/// For data that each rank has for each other: how much of it a slot holds for one.
size_t shard_of_slot(const SharedGroup& group) {
  return group.slot_bytes() / static_cast<size_t>(group.size()) / 64 * 64;
}

/// What all that reduces in slots knows. `takes`: this rank gets the result.
class Reduce : public Plan {
 public:
  Reduce(const SharedGroup& group, std::byte* data, size_t count, size_t element,
         ReduceKernel kernel, bool takes)
      : data_(data),
        element_(element),
        kernel_(kernel),
        takes_(takes),
        blocks_(count * element, group.slot_bytes()),
        sources_(static_cast<size_t>(group.size())) {}

 protected:
  std::byte* data_;
  size_t element_;
  ReduceKernel kernel_;
  bool takes_;
  Pieces blocks_;
  std::vector<const void*> sources_;
};

/// Every rank reduces everything.
class DirectReduce final : public Reduce {
 public:
  using Reduce::Reduce;

  int64_t steps() const override { return blocks_.count(); }

  void fill(int64_t step, SharedGroup& group) override {
    const size_t bytes = blocks_.bytes(step);
    copy_bytes(group.give(bytes), data_ + blocks_.offset(step), bytes);
  }

  void drain(int64_t step, SharedGroup& group) override {
    if (!takes_) return;
    const size_t bytes = blocks_.bytes(step);
    std::byte* mine = data_ + blocks_.offset(step);
    find_sources(group, mine, bytes, 0, sources_);
    kernel_(mine, sources_.data(), group.size(), bytes / element_);
  }
};

/// Each rank reduces its part of a block in the step in which the block is given, and puts the
/// result where its own part of the slot lies unused; a step later the parts are collected.
class SharedReduce final : public Reduce {
 public:
  using Reduce::Reduce;

  int64_t steps() const override { return blocks_.count() + 1; }

  void fill(int64_t step, SharedGroup& group) override {
    if (step == blocks_.count()) return;
    const Shard mine = shard(step, group.rank(), group.size());
    const size_t bytes = blocks_.bytes(step);
    std::byte* slot = group.give(group.slot_bytes());
    const std::byte* block = data_ + blocks_.offset(step);
    copy_bytes(slot, block, mine.begin);
    copy_bytes(slot + mine.end, block + mine.end, bytes - mine.end);
  }

  void drain(int64_t step, SharedGroup& group) override {
    if (step < blocks_.count()) reduce(step, group);
    if (step > 0 && takes_) collect(step - 1, group);
  }

 private:
  Shard shard(int64_t block, int rank, int size) const {
    return {blocks_.bytes(block), rank, size};
  }

  void reduce(int64_t block, SharedGroup& group) {
    const Shard mine = shard(block, group.rank(), group.size());
    if (mine.begin == mine.end) return;
    std::byte* own = data_ + blocks_.offset(block) + mine.begin;
    find_sources(group, own, group.slot_bytes(), mine.begin, sources_);
    std::byte* result = group.given(group.rank(), group.slot_bytes()) + mine.begin;
    // In pieces that are still in the first-level cache when they are copied.
    for (size_t left = mine.end - mine.begin; left > 0;) {
      const size_t bytes = std::min(left, kReduceBytes);
      std::byte* target = takes_ ? own : result;
      kernel_(target, sources_.data(), group.size(), bytes / element_);
      if (takes_) copy_bytes(result, own, bytes);
      for (auto& source : sources_) source = static_cast<const std::byte*>(source) + bytes;
      own += bytes;
      result += bytes;
      left -= bytes;
    }
  }

  void collect(int64_t block, SharedGroup& group) {
    for (int other = 0; other < group.size(); ++other) {
      if (other == group.rank()) continue;
      const Shard theirs = shard(block, other, group.size());
      copy_bytes(data_ + blocks_.offset(block) + theirs.begin,
                 group.given(other, group.slot_bytes(), 1) + theirs.begin,
                 theirs.end - theirs.begin);
    }
  }
};

/// All ranks' data lies in a region. In the first step each rank reduces its share into everyone's
/// memory, and the second tells that all have.
class ReduceInPlace : public Plan {
 public:
  ReduceInPlace(const SharedGroup& group, const Region& region, size_t offset, size_t count,
                size_t element, ReduceKernel kernel)
      : element_(element), kernel_(kernel), shard_(count * element, group.rank(), group.size()) {
    for (int rank = 0; rank < group.size(); ++rank)
      parts_.push_back(region.part(rank) + offset + shard_.begin);
  }

  int64_t steps() const override { return 2; }
  void fill(int64_t, SharedGroup&) override {}
  void drain(int64_t step, SharedGroup& group) override {
    if (step > 0) return;
    std::vector<const void*> sources(parts_.begin(), parts_.end());
    // In pieces that are still in the first-level cache when they are copied.
    for (size_t at = shard_.begin; at < shard_.end;) {
      const size_t bytes = std::min(shard_.end - at, kReduceBytes);
      std::byte* result = parts_[static_cast<size_t>(group.rank())];
      kernel_(result, sources.data(), group.size(), bytes / element_);
      for (size_t rank = 0; rank < parts_.size(); ++rank) {
        if (parts_[rank] != result) copy_bytes(parts_[rank], result, bytes);
        sources[rank] = parts_[rank] += bytes;
      }
      at += bytes;
    }
  }

 private:
  size_t element_;
  ReduceKernel kernel_;
  Shard shard_;
  std::vector<std::byte*> parts_;  ///< What is left of this rank's share of each.
};

class Broadcast : public Plan {
 public:
  Broadcast(const SharedGroup& group, std::byte* data, size_t bytes, int root)
      : data_(data), root_(root), pieces_(bytes, group.slot_bytes()) {}

  int64_t steps() const override { return pieces_.count(); }
  void fill(int64_t step, SharedGroup& group) override {
    const size_t bytes = pieces_.bytes(step);
    if (group.rank() == root_) copy_bytes(group.give(bytes), data_ + pieces_.offset(step), bytes);
  }
  void drain(int64_t step, SharedGroup& group) override {
    const size_t bytes = pieces_.bytes(step);
    if (group.rank() != root_)
      copy_bytes(data_ + pieces_.offset(step), group.given(root_, bytes), bytes);
  }

 private:
  std::byte* data_;
  int root_;
  Pieces pieces_;
};

class AllGather : public Plan {
 public:
  AllGather(const SharedGroup& group, const std::byte* input, size_t bytes,
            std::vector<std::byte*> outputs)
      : input_(input), outputs_(std::move(outputs)), pieces_(bytes, group.slot_bytes()) {}

  int64_t steps() const override { return pieces_.count(); }
  void fill(int64_t step, SharedGroup& group) override {
    const size_t bytes = pieces_.bytes(step);
    copy_bytes(group.give(bytes), input_ + pieces_.offset(step), bytes);
  }
  void drain(int64_t step, SharedGroup& group) override {
    if (outputs_.empty()) return;
    const size_t at = pieces_.offset(step), bytes = pieces_.bytes(step);
    for (int rank = 0; rank < group.size(); ++rank) {
      std::byte* output = outputs_[static_cast<size_t>(rank)] + at;
      copy_bytes(output, rank == group.rank() ? input_ + at : group.given(rank, bytes), bytes);
    }
  }

 private:
  const std::byte* input_;
  std::vector<std::byte*> outputs_;
  Pieces pieces_;
};

class ReduceScatter : public Plan {
 public:
  ReduceScatter(const SharedGroup& group, std::vector<const std::byte*> inputs, std::byte* output,
                size_t count, size_t element, ReduceKernel kernel)
      : inputs_(std::move(inputs)),
        output_(output),
        element_(element),
        kernel_(kernel),
        shard_(shard_of_slot(group)),
        pieces_(count * element, shard_),
        sources_(static_cast<size_t>(group.size())) {}

  int64_t steps() const override { return pieces_.count(); }
  void fill(int64_t step, SharedGroup& group) override {
    std::byte* slot = group.give(group.slot_bytes());
    for (size_t rank = 0; rank < inputs_.size(); ++rank) {
      if (static_cast<int>(rank) != group.rank())
        copy_bytes(slot + rank * shard_, inputs_[rank] + pieces_.offset(step), pieces_.bytes(step));
    }
  }
  void drain(int64_t step, SharedGroup& group) override {
    const size_t at = pieces_.offset(step);
    const auto me = static_cast<size_t>(group.rank());
    find_sources(group, inputs_[me] + at, group.slot_bytes(), me * shard_, sources_);
    kernel_(output_ + at, sources_.data(), group.size(), pieces_.bytes(step) / element_);
  }

 private:
  std::vector<const std::byte*> inputs_;
  std::byte* output_;
  size_t element_;
  ReduceKernel kernel_;
  size_t shard_;
  Pieces pieces_;
  std::vector<const void*> sources_;
};

/// What each rank has for each other. `most`: the largest share of all, on which all agree.
class Exchange : public Plan {
 public:
  Exchange(const SharedGroup& group, Buffers sends, Buffers receives, size_t most)
      : sends_(std::move(sends)), receives_(std::move(receives)), shard_(shard_of_slot(group)) {
    limit_to(most);
  }
  void limit_to(size_t most) { steps_ = static_cast<int64_t>((most + shard_ - 1) / shard_); }

  int64_t steps() const override { return std::max<int64_t>(1, steps_); }
  void fill(int64_t step, SharedGroup& group) override {
    std::byte* slot = group.give(group.slot_bytes());
    for (size_t rank = 0; rank < sends_.size(); ++rank) {
      if (static_cast<int>(rank) == group.rank()) continue;
      const auto [at, bytes] = piece(step, sends_[rank].size());
      copy_bytes(slot + rank * shard_, sends_[rank].data() + at, bytes);
    }
  }
  void drain(int64_t step, SharedGroup& group) override {
    const auto me = static_cast<size_t>(group.rank());
    if (step == 0) copy_bytes(receives_[me].data(), sends_[me].data(), receives_[me].size());
    for (size_t rank = 0; rank < receives_.size(); ++rank) {
      if (rank == me) continue;
      const auto [at, bytes] = piece(step, receives_[rank].size());
      copy_bytes(receives_[rank].data() + at,
                 group.given(static_cast<int>(rank), group.slot_bytes()) + me * shard_, bytes);
    }
  }

 protected:
  struct Piece {
    size_t at, bytes;
  };
  Piece piece(int64_t step, size_t total) const {
    const size_t at = std::min(total, static_cast<size_t>(step) * shard_);
    return {at, std::min(shard_, total - at)};
  }

  Buffers sends_;
  Buffers receives_;
  size_t shard_;
  int64_t steps_ = 0;
};

/// The first step tells everyone how much passes between any two ranks; all check all of it, so
/// that all come to the same result, and know how many steps follow.
class AllToAll final : public Exchange {
 public:
  AllToAll(const SharedGroup& group, const Call& call, Buffers sends, Buffers receives,
           std::chrono::milliseconds timeout)
      : Exchange(group, std::move(sends), std::move(receives), 0), call_(call), timeout_(timeout) {}

  int64_t steps() const override { return 1 + steps_; }

  void fill(int64_t step, SharedGroup& group) override {
    if (step > 0) return Exchange::fill(step - 1, group);
    std::byte* slot = group.give(group.slot_bytes());
    for (const auto* buffers : {&sends_, &receives_}) {
      for (const auto& buffer : *buffers) {
        const uint64_t bytes = buffer.size();
        std::memcpy(slot, &bytes, sizeof(bytes));
        slot += sizeof(bytes);
      }
    }
  }

  void drain(int64_t step, SharedGroup& group) override {
    if (step > 0) return Exchange::drain(step - 1, group);
    agree(group);
    const auto me = static_cast<size_t>(group.rank());
    if (steps_ == 0) copy_bytes(receives_[me].data(), sends_[me].data(), receives_[me].size());
  }

 private:
  void agree(SharedGroup& group) {
    const auto n = static_cast<size_t>(group.size());
    uint64_t most = 0;
    bool same = true;
    const auto entry = [&](size_t rank, size_t index) {
      uint64_t value = 0;
      std::memcpy(&value,
                  group.given(static_cast<int>(rank), group.slot_bytes()) + index * sizeof(value),
                  sizeof(value));
      return value;
    };
    for (size_t from = 0; from < n; ++from) {
      for (size_t to = 0; to < n; ++to) {
        const uint64_t bytes = entry(from, to);
        same = same && bytes == entry(to, n + from);
        if (from != to) most = std::max(most, bytes);
      }
    }
    if (!same) group.differ(call_, timeout_);
    limit_to(most);
  }

  const Call& call_;
  std::chrono::milliseconds timeout_;
};

/// Data in a region: in the first step all have written their parts, and each rank reduces. The
/// second tells that all have.
class ReduceScatterInPlace : public Plan {
 public:
  ReduceScatterInPlace(std::vector<const void*> sources, std::byte* output, size_t count,
                       ReduceKernel kernel)
      : sources_(std::move(sources)), output_(output), count_(count), kernel_(kernel) {}

  int64_t steps() const override { return 2; }
  void fill(int64_t, SharedGroup&) override {}
  void drain(int64_t step, SharedGroup& group) override {
    if (step == 0) kernel_(output_, sources_.data(), group.size(), count_);
  }

 private:
  std::vector<const void*> sources_;
  std::byte* output_;
  size_t count_;
  ReduceKernel kernel_;
};

class Sequence : public Plan {
 public:
  explicit Sequence(std::vector<std::unique_ptr<Plan>> plans) : plans_(std::move(plans)) {
    for (const auto& plan : plans_) steps_ += plan->steps();
  }
  int64_t steps() const override { return std::max<int64_t>(1, steps_); }
  void fill(int64_t step, SharedGroup& group) override {
    if (plans_.empty()) return;
    if (step - first_ == plans_[at_]->steps()) first_ += plans_[at_++]->steps();
    plans_[at_]->fill(step - first_, group);
  }
  void drain(int64_t step, SharedGroup& group) override {
    if (!plans_.empty()) plans_[at_]->drain(step - first_, group);
  }

 private:
  std::vector<std::unique_ptr<Plan>> plans_;
  int64_t steps_ = 0;
  int64_t first_ = 0;
  size_t at_ = 0;
};

std::unique_ptr<Plan> reducing(const SharedGroup& group, std::byte* data, size_t count,
                               DataType type, ReduceKernel kernel, bool takes) {
  const size_t element = size_of(type);
  if (count * element <= direct_limit(group))
    return std::make_unique<DirectReduce>(group, data, count, element, kernel, takes);
  return std::make_unique<SharedReduce>(group, data, count, element, kernel, takes);
}

}  // namespace

std::unique_ptr<Plan> all_reduce_plan(const SharedGroup& group, std::byte* data, size_t count,
                                      DataType type, ReduceKernel kernel) {
  return reducing(group, data, count, type, kernel, true);
}

std::unique_ptr<Plan> all_reduce_plan(const SharedGroup& group, const Region& region, size_t offset,
                                      size_t count, DataType type, ReduceKernel kernel) {
  return std::make_unique<ReduceInPlace>(group, region, offset, count, size_of(type), kernel);
}

bool pays_in_place(const SharedGroup& group, size_t bytes) {
  return bytes > direct_limit(group);
}

std::unique_ptr<Plan> reduce_plan(const SharedGroup& group, std::byte* data, size_t count,
                                  DataType type, ReduceKernel kernel, int root) {
  return reducing(group, data, count, type, kernel, group.rank() == root);
}

std::unique_ptr<Plan> broadcast_plan(const SharedGroup& group, std::byte* data, size_t bytes,
                                     int root) {
  return std::make_unique<Broadcast>(group, data, bytes, root);
}

std::unique_ptr<Plan> all_gather_plan(const SharedGroup& group, const std::byte* input,
                                      size_t bytes, std::vector<std::byte*> outputs) {
  return std::make_unique<AllGather>(group, input, bytes, std::move(outputs));
}

std::unique_ptr<Plan> scatter_plan(const SharedGroup& group,
                                   const std::vector<const std::byte*>& inputs, std::byte* output,
                                   size_t bytes, int root) {
  Buffers sends(static_cast<size_t>(group.size())), receives(sends.size());
  for (size_t rank = 0; group.rank() == root && rank < inputs.size(); ++rank)
    sends[rank] = {const_cast<std::byte*>(inputs[rank]), bytes};
  receives[static_cast<size_t>(root)] = {output, bytes};
  return std::make_unique<Exchange>(group, std::move(sends), std::move(receives), bytes);
}

std::unique_ptr<Plan> reduce_scatter_plan(const SharedGroup& group,
                                          std::vector<const std::byte*> inputs, std::byte* output,
                                          size_t count, DataType type, ReduceKernel kernel) {
  return std::make_unique<ReduceScatter>(group, std::move(inputs), output, count, size_of(type),
                                         kernel);
}

std::unique_ptr<Plan> reduce_scatter_plan(const SharedGroup& group, const Region& region,
                                          size_t offset, std::byte* output, size_t count,
                                          DataType type, ReduceKernel kernel) {
  const size_t mine = offset + static_cast<size_t>(group.rank()) * count * size_of(type);
  std::vector<const void*> sources;
  for (int rank = 0; rank < group.size(); ++rank) sources.push_back(region.part(rank) + mine);
  return std::make_unique<ReduceScatterInPlace>(std::move(sources), output, count, kernel);
}

std::unique_ptr<Plan> all_to_all_plan(const SharedGroup& group, const Call& call, Buffers sends,
                                      Buffers receives, std::chrono::milliseconds timeout) {
  return std::make_unique<AllToAll>(group, call, std::move(sends), std::move(receives), timeout);
}

std::unique_ptr<Plan> sequence_plan(std::vector<std::unique_ptr<Plan>> plans) {
  return std::make_unique<Sequence>(std::move(plans));
}

void start(SharedGroup& group, const Call& call, Plan& plan) {
  group.begin(call);
  plan.fill(0, group);
  group.arrive();
}

void finish(SharedGroup& group, const Call& call, Plan& plan, std::chrono::milliseconds timeout,
            Waiter waiter) {
  group.await(call, timeout, waiter);
  group.compare(call, timeout);
  plan.drain(0, group);
  for (int64_t step = 1; step < plan.steps(); ++step) {
    plan.fill(step, group);
    group.arrive();
    group.await(call, timeout, waiter);
    plan.drain(step, group);
  }
}

}  // namespace lockstep::shm
