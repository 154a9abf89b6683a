#include "lockstep/comm/backends/shm/processors.h"

#include <sched.h>

#include <thread>

namespace lockstep::shm {

int usable_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());  // More than 1024 processors.
}

std::chrono::nanoseconds spin_time(int ranks) {
  return ranks <= usable_processors() ? std::chrono::microseconds(100)
                                      : std::chrono::microseconds(1);
}

bool has_spare_processors(int ranks) {
  return 2 * ranks <= usable_processors();
}

}  // namespace lockstep::shm
