#include "lockstep/base/heap.h"

#include <malloc.h>

#include <climits>

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
#ifdef __GLIBC__
  constexpr int kLargest = 32 << 20;  // glibc takes no more.
  return !heap_chosen() && mallopt(M_MMAP_THRESHOLD, kLargest) == 1 &&
         mallopt(M_TRIM_THRESHOLD, INT_MAX) == 1;
#else
  return false;
#endif
}

}  // namespace lockstep
