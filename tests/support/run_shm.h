#pragma once

// For tests: ranks of a group over shared memory, as threads of this process.

#include <chrono>
#include <functional>
#include <vector>

#include "lockstep/comm/backends/shm/shm_backend.h"
#include "tests/support/run_backends.h"

namespace lockstep::test {

inline BackendOptions shm_options(const StorePtr& store, int rank, int size,
                                  std::chrono::milliseconds timeout) {
  BackendOptions options;
  options.store = c10::make_intrusive<c10d::PrefixStore>("shm", store);
  options.rank = rank;
  options.size = size;
  options.timeout = timeout;
  for (int i = 0; i < size; ++i) options.global_ranks.push_back(i);
  return options;
}

using ShmPart = std::function<void(int rank, c10d::Backend& shm, const StorePtr& store)>;

inline std::vector<Outcome> run_shm(int size, const ShmPart& part, int milliseconds = 20'000) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  return run_backends(
      size,
      [&](int rank) {
        return c10::make_intrusive<shm::ShmBackend>(
            shm_options(store, rank, size, std::chrono::milliseconds(milliseconds)));
      },
      [&](int rank, c10d::Backend& shm) { part(rank, shm, store); });
}

}  // namespace lockstep::test
