#pragma once

// For tests: the c10d backends of a group, one per rank, each on a thread of this process.

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

#include "lockstep/comm/checks/checked_backend.h"
#include "tests/support/run_ranks.h"

namespace lockstep::test {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// A store that is lost when messages are compared: to those, or from then on to all.
class StoreLostToMessages final : public c10d::HashStore {
 public:
  explicit StoreLostToMessages(bool to_all = false) : to_all_(to_all) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    throw_if_lost();
    HashStore::set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    throw_if_lost();
    return HashStore::get(key);
  }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    const bool message = key.find("p2p/") != std::string::npos;
    if (message && to_all_) lost_ = true;
    throw_if_lost(message);
    return HashStore::compareSet(key, expected, desired);
  }
  int64_t add(const std::string& key, int64_t value) override {
    throw_if_lost();
    return HashStore::add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    throw_if_lost();
    return HashStore::check(keys);
  }

 private:
  void throw_if_lost(bool message = false) const {
    if (message || lost_) throw std::system_error(EPIPE, std::system_category());
  }

  const bool to_all_;
  std::atomic<bool> lost_{false};
};

/// Another owner of a backend that is known by reference.
inline BackendPtr handle_of(c10d::Backend& backend) {
  return BackendPtr::unsafe_reclaim_from_nonowning(&backend);
}

inline BackendPtr make_gloo(const StorePtr& store, int rank, int size,
                            std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  for (int i = 0; i < size; ++i)  // Gloo's split reads past an empty list.
    options->global_ranks_in_group.push_back(static_cast<uint64_t>(i));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(
      c10::make_intrusive<c10d::PrefixStore>("gloo", store), rank, size, options);
}

/// As run_ranks, with the backend that `make` gives for the rank. All backends live until all parts
/// have ended, as in processes that go on after an error.
[[nodiscard]] inline std::vector<Outcome> run_backends(
    int size, const std::function<BackendPtr(int rank)>& make,
    const std::function<void(int rank, c10d::Backend&)>& part) {
  std::vector<BackendPtr> backends(static_cast<size_t>(size));
  return run_ranks(size, [&](int rank) {
    auto& backend = backends[static_cast<size_t>(rank)];
    backend = make(rank);
    part(rank, *backend);
  });
}

/// The same over checked Gloo. Each rank has a connection of its own to the store, as one client
/// serves one blocking call at a time.
[[nodiscard]] inline std::vector<Outcome> run_gloo(
    int size, CheckedBackendOptions options,
    const std::function<void(int rank, c10d::Backend&)>& part,
    const StorePtr& store = c10::make_intrusive<c10d::HashStore>()) {
  const auto make = [&](int rank) {
    const StorePtr own = store->clone();
    announce_checks(*own, rank, options.group_name, options.debug);
    return make_checked_backend(make_gloo(own, rank, size, options.timeout), own, options);
  };
  return run_backends(size, make, part);
}

}  // namespace lockstep::test
