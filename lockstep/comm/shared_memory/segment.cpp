#include "lockstep/comm/shared_memory/segment.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/base/process_identity.h"
#include "lockstep/comm/shared_memory/fd_handover.h"
#include "lockstep/comm/shared_memory/memory.h"

namespace lockstep::shm {
namespace {

constexpr std::array<char, 8> kMagic{'l', 'o', 'c', 'k', 's', 'h', 'm', '\0'};
constexpr uint32_t kVersion = 7;

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
  return messages_offset(size, slot_bytes) + (size > 1 ? size * size * message_bytes : 0);
}

UniqueFd receive_or_look(const SegmentOptions& options, const std::string& name) {
  try {
    return receive(name, options.rank, options.timeout, options.group);
  } catch (const CommError&) {
    if (options.look) options.look({0});  // It may say more.
    throw;
  }
}

struct flock lock_of(int rank) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

}  // namespace

Segment::Segment(const SegmentOptions& options, const Meeting& meeting)
    : rank_(options.rank),
      size_(options.size),
      // Where each rank has data for each other, its slot holds at least 64 bytes for every one.
      slot_bytes_(std::max((options.slot_bytes + 63) / 64, static_cast<size_t>(options.size)) * 64),
      message_bytes_(whole_pages(options.message_bytes)) {
  if (size_ < 1 || size_ > 4096 || rank_ < 0 || rank_ >= size_)
    throw UsageError("shared memory: rank " + std::to_string(rank_) + " of " +
                     std::to_string(size_) + "; it joins up to 4096 ranks");
  rank_ == 0 ? host(options, meeting) : join(options, meeting);
  record(rank_).processors = own_processors();
  record(rank_).bound.store(1, std::memory_order_release);
}

Segment::~Segment() {
  if (!header_) return;
  record(rank_).state.store(RankState::left, std::memory_order_seq_cst);
}

RankRecord& Segment::record(int rank) const {
  auto* records =
      reinterpret_cast<RankRecord*>(reinterpret_cast<std::byte*>(header_) + records_offset());
  return records[rank];
}

void Segment::enter(int rank, const std::string& identity) {
  store_text(record(rank).identity, identity);
  record(rank).state.store(RankState::joined, std::memory_order_release);
}

void Segment::map(int fd, size_t bytes) {
  mapping_ = Mapping(fd, bytes);
  std::byte* start = mapping_.data();
  header_ = reinterpret_cast<SegmentHeader*>(start);
  slots_ = start + slots_offset(static_cast<size_t>(size_));
  messages_ = start + messages_offset(static_cast<size_t>(size_), slot_bytes_);
}

// A description of its own: the one that rank 0 hands out is all ranks'. Where the system has no
// such locks (EINVAL), ranks of other process namespaces are not seen to end.
void Segment::lock(int fd) {
  struct flock mine = lock_of(rank_);
  const bool open = lock_.open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR);
  if (open && fcntl(lock_.get(), F_OFD_SETLK, &mine) == 0) {
    record(rank_).locked.store(1, std::memory_order_release);
  } else if (!open || errno != EINVAL) {
    const int error = errno;
    record(rank_).state.store(RankState::left, std::memory_order_seq_cst);
    throw SystemError("shared memory: taking the lock that tells of this process's end", error,
                      error == EMFILE ? "" : "use the backend gloo");
  }
}

bool Segment::has_ended(int rank) const {
  const RankRecord& other = record(rank);
  const ProcessState state = process_state(other.identity.data());
  if (state != ProcessState::unknown) return state == ProcessState::ended;
  if (other.locked.load(std::memory_order_acquire) == 0 || !lock_) return false;
  struct flock theirs = lock_of(rank);
  return fcntl(lock_.get(), F_OFD_GETLK, &theirs) == 0 && theirs.l_type == F_UNLCK;
}

void Segment::host(const SegmentOptions& options, const Meeting& meeting) {
  const auto n = static_cast<size_t>(size_);
  const size_t reserved = messages_offset(n, slot_bytes_);
  const size_t total = total_bytes(n, slot_bytes_, message_bytes_);
  const UniqueFd memory = make_memory(total, reserved);
  map(memory.get(), total);
  if (size_ > 1) lock(memory.get());
  header_->version = kVersion;
  header_->size = static_cast<uint32_t>(size_);
  header_->slot_bytes = slot_bytes_;
  header_->message_bytes = message_bytes_;
  header_->total_bytes = total;
  header_->magic = kMagic;
  enter(0, process_identity());
  if (size_ == 1) return;
  hand_out(
      memory.get(), size_, options.timeout, options.group, meeting.tell,
      [this](int rank, const std::string& identity) { enter(rank, identity); }, options.look);
}

void Segment::join(const SegmentOptions& options, const Meeting& meeting) {
  const UniqueFd memory = receive_or_look(options, meeting.ask());
  SegmentHeader header{};
  constexpr size_t kPlain = offsetof(SegmentHeader, barrier);
  const bool read = pread(memory.get(), static_cast<void*>(&header), kPlain, 0) == ssize_t{kPlain};
  if (!read || header.magic != kMagic || header.version != kVersion ||
      header.size != static_cast<uint32_t>(size_) ||
      header.total_bytes != total_bytes(header.size, header.slot_bytes, header.message_bytes))
    throw UsageError("shared memory: rank 0 of group '" + options.group +
                         "' is of another version of Lockstep or sees another number of ranks",
                     "start all ranks from the same build");
  slot_bytes_ = header.slot_bytes;
  message_bytes_ = header.message_bytes;
  map(memory.get(), header.total_bytes);
  lock(memory.get());
}

}  // namespace lockstep::shm
