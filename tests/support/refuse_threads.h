#pragma once

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <fstream>

namespace lockstep::test {

/// For tests, in a process of their own: no thread can be started in this process from now on: a
/// limit of memory leaves some for all but a stack of this size. Stacks of ended threads, which are
/// kept, are smaller.
inline void refuse_threads() {
  constexpr size_t kStack = size_t{256} << 20, kRoom = size_t{64} << 20;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStack);
  ASSERT_EQ(pthread_setattr_default_np(&attributes), 0);
  pthread_attr_destroy(&attributes);
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t most = pages * static_cast<size_t>(sysconf(_SC_PAGESIZE)) + kRoom;
  const rlimit limit{most, most};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
}

}  // namespace lockstep::test
