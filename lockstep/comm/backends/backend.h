#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/checks/checked_backend.h"
#include "lockstep/comm/checks/observed_call.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace lockstep {

/// What c10d's interface does not tell of a backend. Each backend states its own once, beside its
/// `info`. Nobody asks for a backend's name instead.
struct BackendTraits {
  /// Takes tensors that are not contiguous: it copies them in and out.
  bool takes_strided = false;
  /// A call with asyncOp = false runs in its caller's thread. (NCCL takes it for another stream.)
  bool runs_in_caller = false;
  /// Ranks whose calls differ abort, hang or get wrong data: the first calls are to be compared.
  bool needs_comparison = false;
  /// Its errors are lockstep::Error's already and name the ranks at fault.
  bool names_failures = false;
  /// The end of a send or a receive is told only to the thread that waits for it.
  bool tells_only_waiters = false;
  /// A collective may miss that a rank has died, and wait on. Waits may be cut short unharmed, but
  /// not those for reduce_scatter, which do not keep to their time-out.
  bool misses_deaths = false;
  /// Its ranks connect to each other one by one. None may leave before all have done so.
  bool connects_one_by_one = false;
  /// Its tensors are of a CUDA device of the rank's own.
  bool on_cuda = false;
  /// Takes tensors of CUDA devices beside those of the CPU.
  bool takes_cuda = false;
};

/// A backend with the traits of what was made: hierarchical makes a simpler one where it can.
struct MadeBackend {
  c10::intrusive_ptr<c10d::Backend> backend;
  BackendTraits traits;
};

struct BackendOptions {
  c10::intrusive_ptr<c10d::Store> store;  ///< The group's own prefix of the shared store.
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{120'000};  ///< Of forming the group and of each operation.
  std::string interface;  ///< Gloo: the interface to listen on; empty: the one that has `address`.
  std::string address = "127.0.0.1";  ///< Gloo: this host's address that the other ranks reach.
  c10::Device device = c10::kCPU;     ///< NCCL: this rank's own CUDA device.
  std::string group_name = "0";       ///< For traces.
  std::vector<int> global_ranks;      ///< The group's ranks in the default group, for traces.
  /// hierarchical: divides this host further, for ranks that are to count as of several hosts. See
  /// host_id.
  std::string host = {};
  DebugLevel debug = DebugLevel::info;  ///< hierarchical: of its group of all ranks over Gloo.
  /// How many steps of its loop this rank has made (ProcessGroup::note_steps). The others are told
  /// when it leaves. Null: nobody counts.
  std::shared_ptr<const std::atomic<int64_t>> steps = {};
  /// Called again and again, while it forms, with the members that are waited for. Throws when one
  /// of them was lost. A wait of `store` does so by itself. hierarchical: later with none, on a
  /// thread of its own, where it throws what `cancelled` of InitOptions tells and asks no store.
  std::function<void(const std::vector<int>& missing)> look = {};
};

/// How the calls of a backend of these traits, which the options have made, are checked.
inline CheckedBackendOptions checks_of(const BackendOptions& options, const BackendTraits& traits) {
  return {.debug = options.debug,
          .needs_comparison = traits.needs_comparison,
          .names_failures = traits.names_failures,
          .misses_deaths = traits.misses_deaths,
          .global_ranks = options.global_ranks,
          .timeout = options.timeout,
          .group_name = options.group_name};
}

/// A backend of this build, and why it cannot be used here if so.
struct BackendInfo {
  std::string name;
  bool available = false;
  std::string reason;  ///< Why not; empty when available.
  std::string remedy;  ///< What to do about it; empty when available.
  BackendTraits traits;
};

}  // namespace lockstep
