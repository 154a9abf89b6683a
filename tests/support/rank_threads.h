#pragma once

// For tests: the ranks of a group as threads of this process.

#include <c10/util/intrusive_ptr.h>
#include <gtest/gtest.h>

#include <chrono>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

#include "lockstep/comm/checks/checked_backend.h"

namespace lockstep::testing {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Another owner of a backend that is known by reference.
inline BackendPtr handle_of(c10d::Backend& backend) {
  return BackendPtr::unsafe_reclaim_from_nonowning(&backend);
}

/// How a rank's part ended.
struct Outcome {
  std::exception_ptr error;
  bool ok() const { return !error; }
  std::string text() const {
    if (!error) return {};
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& e) {
      return e.what();
    }
  }
  template <class E>
  bool is() const {
    if (!error) return false;
    try {
      std::rethrow_exception(error);
    } catch (const E&) {
      return true;
    } catch (...) {
      return false;
    }
  }
};

inline BackendPtr make_gloo(const StorePtr& store, int rank, int size,
                            std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  for (int i = 0; i < size; ++i)  // Gloo's split reads past an empty list.
    options->global_ranks_in_group.push_back(static_cast<uint64_t>(i));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(
      c10::make_intrusive<c10d::PrefixStore>("gloo", store), rank, size, options);
}

/// Runs `part` once a rank, each on a thread of its own, over a checked Gloo backend. All backends
/// live until all parts have ended, as in processes that go on after an error. Each rank has a
/// connection of its own to the store, as one client serves one blocking call at a time.
inline std::vector<Outcome> run_ranks(int size, CheckedBackendOptions options,
                                      const std::function<void(int, c10d::Backend&)>& part,
                                      StorePtr store = nullptr) {
  if (!store) store = c10::make_intrusive<c10d::HashStore>();
  std::vector<Outcome> outcomes(static_cast<size_t>(size));
  std::vector<BackendPtr> backends(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  options.announced = true;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const StorePtr own = store->clone();
        announce_checks(*own, rank, options.group_name, options.debug);
        auto gloo = make_gloo(own, rank, size, options.timeout);
        auto& backend = backends[static_cast<size_t>(rank)];
        backend = make_checked_backend(gloo, own, options);
        part(rank, *backend);
      } catch (...) {
        outcomes[static_cast<size_t>(rank)].error = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return outcomes;
}

}  // namespace lockstep::testing
