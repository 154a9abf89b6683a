#include "lockstep/comm/backends/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/comm/backends/shm/fd_handover.h"
#include "lockstep/comm/process_identity.h"

namespace lockstep::shm {
namespace {

constexpr std::array<char, 8> kMagic{'l', 'o', 'c', 'k', 's', 'h', 'm', '\0'};
constexpr uint32_t kVersion = 1;

size_t records_offset() {
  return sizeof(SegmentHeader);
}
size_t slots_offset(size_t size) {
  return records_offset() + size * sizeof(RankRecord);
}
size_t page_up(size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}
size_t messages_offset(size_t size, size_t slot_bytes) {
  return page_up(slots_offset(size) + size * kSlots * (kSlotHeader + slot_bytes));
}

std::string mebibytes(size_t bytes) {
  return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB";
}

/// A write past RLIMIT_FSIZE ends the process by SIGXFSZ: look before.
void check_file_limit(size_t bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  if (limit.rlim_cur < bytes) {
    throw SystemError("shared memory: the limit on the size of files (ulimit -f) of " +
                          std::to_string(limit.rlim_cur >> 10) + " KiB is below the " +
                          mebibytes(bytes) + " that the group needs",
                      EFBIG, "raise it with `ulimit -f unlimited`, or use --backend gloo");
  }
}

Descriptor make_memory(size_t bytes, size_t reserved) {
  check_file_limit(bytes);
  Descriptor fd(memfd_create("lockstep", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0)
    throw SystemError("shared memory: memfd_create", errno, "use --backend gloo instead");
  // Nobody can shorten it afterwards, which would end the others by SIGBUS.
  if (fchmod(fd.get(), 0600) != 0 || ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    throw SystemError("shared memory: setting up " + mebibytes(bytes), errno);
  if (const int error = posix_fallocate(fd.get(), 0, static_cast<off_t>(reserved)); error != 0)
    throw SystemError("shared memory: reserving " + mebibytes(reserved), error,
                      "free memory or raise the container's limit (docker run --memory), or use "
                      "fewer ranks on this host or --backend gloo");
  return fd;
}

template <size_t N>
void store_text(std::array<char, N>& target, const std::string& text) {
  const size_t length = std::min(text.size(), N - 1);
  std::memcpy(target.data(), text.data(), length);
  target[length] = '\0';
}

}  // namespace

Segment::Segment(const SegmentOptions& options, const Meeting& meeting)
    : rank_(options.rank),
      size_(options.size),
      // Where each rank has data for each other, its slot holds at least 64 bytes for every one.
      slot_bytes_(std::max((options.slot_bytes + 63) / 64, static_cast<size_t>(options.size)) * 64),
      message_bytes_(page_up(options.message_bytes)) {
  if (size_ < 1 || size_ > 4096 || rank_ < 0 || rank_ >= size_)
    throw UsageError("shared memory: rank " + std::to_string(rank_) + " of " +
                     std::to_string(size_) + "; it joins up to 4096 ranks");
  rank_ == 0 ? host(options, meeting) : join(options, meeting);
}

Segment::~Segment() {
  if (!header_) return;
  record(rank_).state.store(RankState::left, std::memory_order_seq_cst);
  munmap(header_, bytes_);
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
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED)
    throw SystemError("shared memory: mapping " + mebibytes(bytes), errno,
                      "is there a limit on address space (ulimit -v)?");
  bytes_ = bytes;
  header_ = static_cast<SegmentHeader*>(memory);
  auto* start = static_cast<std::byte*>(memory);
  slots_ = start + slots_offset(static_cast<size_t>(size_));
  messages_ = start + messages_offset(static_cast<size_t>(size_), slot_bytes_);
}

void Segment::host(const SegmentOptions& options, const Meeting& meeting) {
  const auto n = static_cast<size_t>(size_);
  const size_t reserved = messages_offset(n, slot_bytes_);
  const size_t total = reserved + (n > 1 ? n * n * message_bytes_ : 0);
  const Descriptor memory = make_memory(total, reserved);
  map(memory.get(), total);
  header_->version = kVersion;
  header_->size = static_cast<uint32_t>(size_);
  header_->slot_bytes = slot_bytes_;
  header_->message_bytes = message_bytes_;
  header_->total_bytes = total;
  header_->magic = kMagic;
  enter(0, process_identity());
  if (size_ == 1) return;
  hand_out(memory.get(), size_, options.timeout, options.group, meeting.tell,
           [this](int rank, const std::string& identity) { enter(rank, identity); });
}

void Segment::join(const SegmentOptions& options, const Meeting& meeting) {
  const Descriptor memory = receive(meeting.ask(), rank_, options.timeout, options.group);
  SegmentHeader header{};
  constexpr size_t kPlain = offsetof(SegmentHeader, barrier);
  const bool read = pread(memory.get(), static_cast<void*>(&header), kPlain, 0) == ssize_t{kPlain};
  if (!read || header.magic != kMagic || header.version != kVersion ||
      header.size != static_cast<uint32_t>(size_))
    throw UsageError("shared memory: rank 0 of group '" + options.group +
                         "' is of another version of Lockstep or sees another number of ranks",
                     "start all ranks from the same build");
  slot_bytes_ = header.slot_bytes;
  message_bytes_ = header.message_bytes;
  map(memory.get(), header.total_bytes);
}

std::string missing_support() {
  const Descriptor fd(memfd_create("lockstep", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0) return std::string("memfd_create: ") + std::strerror(errno);
  return {};
}

}  // namespace lockstep::shm
