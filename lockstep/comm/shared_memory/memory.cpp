#include "lockstep/comm/shared_memory/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/file_size_limit.h"
#include "lockstep/base/process_identity.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/shared_memory/futex.h"

namespace lockstep::shm {
namespace {

/// "3 MiB", rounded up.
std::string mebibytes(size_t bytes) {
  return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB";
}

UniqueFd make_memory(size_t bytes, size_t reserved) {
  ignore_file_size_signal();
  UniqueFd fd(memfd_create("lockstep", MFD_CLOEXEC));
  if (!fd) throw SystemError("shared memory: memfd_create", errno, "use the backend gloo instead");
  if (fchmod(fd.get(), 0600) != 0 || ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)
    throw SystemError("shared memory: setting up " + mebibytes(bytes), errno);
  if (reserved == 0) return fd;
  if (const int error = posix_fallocate(fd.get(), 0, static_cast<off_t>(reserved)); error != 0)
    throw SystemError("shared memory: reserving " + mebibytes(reserved), error,
                      "free memory or raise the container's limit (docker run --memory), or use "
                      "fewer ranks on this host or --backend gloo");
  return fd;
}

}  // namespace

size_t whole_pages(size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

SharedMemory::SharedMemory(const MeetingOptions& options, const Meeting& meeting, size_t bytes,
                           size_t reserved)
    : options_(options),
      meeting_(meeting),
      offset_(whole_pages(sizeof(Arrivals) + static_cast<size_t>(options.size))),
      bytes_(offset_ + bytes),
      memory_(options_.rank == 0 ? make_memory(bytes_, offset_ + reserved)
                                 : open_memory_of_rank_0()) {
  // A look beyond its end would be a SIGBUS.
  struct stat status {};
  if (fstat(memory_.get(), &status) != 0 || static_cast<size_t>(status.st_size) != bytes_)
    throw CommError(what() + "what rank 0 has handed over is not memory of " + mebibytes(bytes_),
                    "start all ranks from the same build, in one process namespace");
  void* mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, memory_.get(), 0);
  if (mapped == MAP_FAILED)
    throw SystemError(what() + "mapping " + mebibytes(bytes_), errno,
                      "is there a limit on address space (ulimit -v)?");
  mapped_ = static_cast<std::byte*>(mapped);
  if (options_.rank != 0) memory_.reset();
}

SharedMemory::~SharedMemory() {
  munmap(mapped_, bytes_);
}

UniqueFd SharedMemory::open_memory_of_rank_0() const {
  constexpr std::chrono::milliseconds kPause{1};
  const auto deadline = std::chrono::steady_clock::now() + options_.timeout;
  std::string told = meeting_.ask();
  for (; told.empty(); told = meeting_.ask()) {
    if (options_.look) options_.look({0});
    if (std::chrono::steady_clock::now() >= deadline)
      throw TimeoutError(what() + "rank 0 did not come within " + seconds_text(options_.timeout));
    std::this_thread::sleep_for(kPause);
  }
  const std::string descriptor = told.substr(0, told.find(' '));
  const std::string identity = told.substr(std::min(told.size(), descriptor.size() + 1));
  const std::string process = std::to_string(process_number(identity));
  if (!parse_int(descriptor))
    throw CommError(what() + "rank 0 has told '" + told + "', which names no memory",
                    "start all ranks from the same build");
  UniqueFd memory(open(("/proc/" + process + "/fd/" + descriptor).c_str(), O_RDWR | O_CLOEXEC));
  if (memory) return memory;
  const int error = errno;
  if (options_.look) options_.look({0});  // It may say more.
  const ProcessState state = process_state(identity);
  if (error == ENOENT && state == ProcessState::unknown)
    throw UsageError(
        what() + "rank 0 is in another process namespace ('" + told + "')",
        "let the containers share it (docker run --pid host), or use the backend gloo");
  // ENXIO: the descriptor is a socket's or the like by now. One that ends can give EACCES.
  if (error == ENOENT || error == ENXIO || state == ProcessState::ended)
    throw PeerLostError(what() + "rank 0 (process " + process + ") has ended or waits no more",
                        "look at what rank 0 printed last");
  if (error == EACCES || error == EPERM)
    throw UsageError(what() + "rank 0 (process " + process + ") runs as another user",
                     "start all ranks of a host as one user, or use the backend gloo");
  throw SystemError(what() + "opening rank 0's memory", error);
}

std::vector<int> SharedMemory::missing() const {
  std::vector<int> ranks;
  for (int rank = 1; rank < options_.size; ++rank)
    if (arrivals().of_rank[rank].load(std::memory_order_acquire) == 0) ranks.push_back(rank);
  return ranks;
}

std::vector<int> SharedMemory::in_default_group(std::vector<int> ranks) const {
  for (int& rank : ranks)
    if (!options_.names.empty()) rank = options_.names[static_cast<size_t>(rank)];
  return ranks;
}

void SharedMemory::meet() {
  constexpr std::chrono::milliseconds kSlice{20};
  auto& count = arrivals().count;
  if (options_.rank != 0) {
    arrivals().of_rank[options_.rank].store(1, std::memory_order_release);
    count.fetch_add(1, std::memory_order_seq_cst);
    return wake_all(count);
  }
  const auto deadline = std::chrono::steady_clock::now() + options_.timeout;
  if (options_.size > 1) meeting_.tell(std::to_string(memory_.get()) + " " + process_identity());
  while (true) {
    const uint32_t seen = count.load(std::memory_order_seq_cst);
    const std::vector<int> ranks = missing();
    if (ranks.empty()) break;
    if (options_.look) options_.look(ranks);
    if (std::chrono::steady_clock::now() >= deadline)
      throw_late(what(), in_default_group(ranks), options_.timeout);
    sleep_on(count, seen, kSlice);
  }
  memory_.reset();
}

}  // namespace lockstep::shm
