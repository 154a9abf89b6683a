#include "lockstep/comm/shared_memory/segment.h"

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/process_identity.h"

namespace lockstep::shm {
namespace {

constexpr std::array<char, 8> kVersion{'l', 'o', 'c', 'k', 's', 'h', 'm', 9};

size_t records_offset() {
  constexpr size_t kAlign = alignof(RankRecord);
  return (sizeof(SegmentHeader) + kAlign - 1) / kAlign * kAlign;
}
size_t slots_offset(size_t size) {
  return records_offset() + size * sizeof(RankRecord);
}
size_t messages_offset(size_t size, size_t slot_bytes) {
  return whole_pages(slots_offset(size) + size * kSlots * (kSlotHeader + slot_bytes));
}
size_t total_bytes(size_t size, size_t slot_bytes, size_t message_bytes) {
  return messages_offset(size, slot_bytes) + size * (size + 1) * message_bytes;
}

/// Where each rank has data for each other, its slot holds at least 64 bytes for every one.
size_t whole_slot(const SegmentOptions& options) {
  return std::max((options.slot_bytes + 63) / 64, static_cast<size_t>(options.size)) * 64;
}

const SegmentOptions& checked(const SegmentOptions& options) {
  if (options.size < 1 || options.size > 4096 || options.rank < 0 || options.rank >= options.size)
    throw UsageError("shared memory: rank " + std::to_string(options.rank) + " of " +
                     std::to_string(options.size) + "; it joins up to 4096 ranks");
  return options;
}

}  // namespace

Segment::Segment(const SegmentOptions& options, const Meeting& meeting)
    : rank_(checked(options).rank),
      size_(options.size),
      slot_bytes_(whole_slot(options)),
      message_bytes_(whole_pages(options.message_bytes)),
      memory_(options, meeting,
              total_bytes(static_cast<size_t>(size_), slot_bytes_, message_bytes_),
              messages_offset(static_cast<size_t>(size_), slot_bytes_)),
      header_(reinterpret_cast<SegmentHeader*>(memory_.data())),
      slots_(memory_.data() + slots_offset(static_cast<size_t>(size_))),
      messages_(memory_.data() + messages_offset(static_cast<size_t>(size_), slot_bytes_)) {
  if (rank_ == 0) header_->version = kVersion;
  if (header_->version != kVersion)
    throw CommError(
        "shared memory: rank 0 of group '" + options.group + "' is of another version of Lockstep",
        "start all ranks from the same build");
  RankRecord& mine = record(rank_);
  const std::string identity = process_identity();
  mine.identity[identity.copy(mine.identity.data(), mine.identity.size() - 1)] = '\0';
  sched_getaffinity(0, sizeof(mine.processors), &mine.processors);
  mine.state.store(RankState::joined, std::memory_order_release);
  try {
    memory_.meet();
  } catch (const CommError& error) {
    // For ranks that have come already: this process may live on.
    note_cause(error.failure());
    leave();
    throw;
  } catch (...) {
    leave();
    throw;
  }
}

Segment::~Segment() {
  leave();
}

void Segment::leave(int64_t rounds) noexcept {
  RankRecord& mine = record(rank_);
  if (rounds > 0) mine.rounds.store(rounds, std::memory_order_relaxed);
  mine.state.store(RankState::left, std::memory_order_seq_cst);
}

void Segment::note_cause(const Failure& cause) noexcept {
  RankRecord& mine = record(rank_);
  if (mine.caused.load(std::memory_order_relaxed) != 0) return;
  store_failure(mine.cause, cause);
  mine.caused.store(1, std::memory_order_release);
}

RankRecord& Segment::record(int rank) const {
  auto* records =
      reinterpret_cast<RankRecord*>(reinterpret_cast<std::byte*>(header_) + records_offset());
  return records[rank];
}

bool Segment::has_ended(int rank) const {
  return process_state(record(rank).identity.data()) == ProcessState::ended;
}

}  // namespace lockstep::shm
