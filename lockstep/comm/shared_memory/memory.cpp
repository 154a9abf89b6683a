#include "lockstep/comm/shared_memory/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::shm {
namespace {

/// A write past RLIMIT_FSIZE ends the process by SIGXFSZ: look before.
void check_file_limit(size_t bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  if (limit.rlim_cur < bytes) {
    throw SystemError("shared memory: the limit on the size of files (ulimit -f) of " +
                          std::to_string(limit.rlim_cur >> 10) + " KiB is below the " +
                          mebibytes(bytes) + " that the group needs",
                      EFBIG, "raise it with `ulimit -f unlimited`, or use the backend gloo");
  }
}

/// Neither shorter than `bytes` nor ever made so: a look beyond its end is a SIGBUS.
bool holds(int fd, size_t bytes) {
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_SEAL;
  const int seals = fcntl(fd, F_GET_SEALS);
  struct stat status {};
  return seals >= 0 && (seals & kSeals) == kSeals && fstat(fd, &status) == 0 &&
         static_cast<size_t>(status.st_size) == bytes;
}

}  // namespace

std::string mebibytes(size_t bytes) {
  return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB";
}

size_t whole_pages(size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

UniqueFd make_memory(size_t bytes, size_t reserved) {
  check_file_limit(bytes);
  UniqueFd fd(memfd_create("lockstep", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw SystemError("shared memory: memfd_create", errno, "use the backend gloo instead");
  // Nobody can shorten it afterwards, which would end the others by SIGBUS.
  if (fchmod(fd.get(), 0600) != 0 || ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    throw SystemError("shared memory: setting up " + mebibytes(bytes), errno);
  if (reserved == 0) return fd;
  if (const int error = posix_fallocate(fd.get(), 0, static_cast<off_t>(reserved)); error != 0)
    throw SystemError("shared memory: reserving " + mebibytes(reserved), error,
                      "free memory or raise the container's limit (docker run --memory), or use "
                      "fewer ranks on this host or --backend gloo");
  return fd;
}

Mapping::Mapping(int fd, size_t bytes) : bytes_(bytes) {
  if (!holds(fd, bytes))
    throw CommError("shared memory: what rank 0 has handed over is not memory of " +
                        mebibytes(bytes) + " that nobody can shorten",
                    "start all ranks from the same build");
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED)
    throw SystemError("shared memory: mapping " + mebibytes(bytes), errno,
                      "is there a limit on address space (ulimit -v)?");
  data_ = static_cast<std::byte*>(memory);
}

Mapping::~Mapping() {
  if (data_) munmap(data_, bytes_);
}

Mapping::Mapping(Mapping&& other) noexcept {
  *this = std::move(other);
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

std::string missing_support() {
  const UniqueFd fd(memfd_create("lockstep", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return std::string("memfd_create: ") + std::strerror(errno);
  return {};
}

}  // namespace lockstep::shm
