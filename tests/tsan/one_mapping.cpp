// ThreadSanitizer knows memory by its address, so it sees no race between two ranks that have
// mapped the same memory twice. Here all ranks of this process get one mapping of a file.
#include <sys/mman.h>
#include <sys/stat.h>

#include <map>
#include <mutex>

// The linker's names for what --wrap stands before.
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming)
extern "C" {
void* __real_mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset);
int __real_munmap(void* address, size_t bytes);
}

namespace {

struct Mapping {
  void* memory;
  int users;
};
std::mutex mutex;
std::map<ino_t, Mapping>& mappings() {
  static auto* all = new std::map<ino_t, Mapping>;  // Used until the very end of the process.
  return *all;
}

}  // namespace

extern "C" void* __wrap_mmap(void* address, size_t bytes, int protection, int flags, int fd,
                             off_t offset) {
  if (fd < 0) return __real_mmap(address, bytes, protection, flags, fd, offset);
  struct stat status {};
  fstat(fd, &status);
  const std::lock_guard lock(mutex);
  const auto known = mappings().find(status.st_ino);
  if (known != mappings().end()) {
    ++known->second.users;
    return known->second.memory;
  }
  void* memory = __real_mmap(address, bytes, protection, flags, fd, offset);
  mappings()[status.st_ino] = {memory, 1};
  return memory;
}

extern "C" int __wrap_munmap(void* address, size_t bytes) {
  const std::lock_guard lock(mutex);
  for (auto entry = mappings().begin(); entry != mappings().end(); ++entry) {
    if (entry->second.memory != address) continue;
    if (--entry->second.users > 0) return 0;
    mappings().erase(entry);
    break;
  }
  return __real_munmap(address, bytes);
}
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
