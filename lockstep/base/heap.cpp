#include "lockstep/base/heap.h"

#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <climits>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "lockstep/base/env.h"

namespace lockstep {

std::optional<std::string> heap_chosen() {
  for (const char* name :
       {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_"})
    if (env_string(name)) return name;
  const auto tunables = env_string("GLIBC_TUNABLES");
  if (tunables && tunables->find("glibc.malloc.") != std::string::npos) return "GLIBC_TUNABLES";
  return std::nullopt;
}

bool keep_freed_memory() {
  constexpr int kLargest = 32 << 20;  // glibc takes no more.
  return !heap_chosen() && mallopt(M_MMAP_THRESHOLD, kLargest) == 1 &&
         mallopt(M_TRIM_THRESHOLD, INT_MAX) == 1;
}

namespace {

/// A wish only: `madvise` must be allowed (/sys/kernel/mm/transparent_hugepage/enabled), and the
/// memory must not be in use already.
void prefer_huge_pages(const void* data, size_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

/// Allocates until the heap's end moves, or as many bytes.
void grow_heap_past(const void* end, size_t bytes) {
  constexpr size_t kBlock = 64 << 10;  // Less than what malloc maps apart from the heap.
  std::vector<std::unique_ptr<std::byte[]>> blocks;
  while (sbrk(0) == end && blocks.size() * kBlock < bytes) {
    std::unique_ptr<std::byte[]> block(new (std::nothrow) std::byte[kBlock]);
    if (!block) return;
    blocks.push_back(std::move(block));
  }
}

}  // namespace

bool grow_heap_in_huge_pages(size_t bytes) {
  if (heap_chosen() || bytes > INT_MAX || mallopt(M_TOP_PAD, static_cast<int>(bytes)) != 1)
    return false;
  const auto* const before = static_cast<std::byte*>(sbrk(0));
  grow_heap_past(before, bytes);
  const auto* const after = static_cast<std::byte*>(sbrk(0));
  if (after > before) {
    prefer_huge_pages(before, static_cast<size_t>(after - before));
    return true;
  }
  mallopt(M_TOP_PAD, 128 << 10);  // glibc's own.
  return false;
}

}  // namespace lockstep
