#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/checks/debug_level.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace lockstep {

struct BackendOptions;
/// Makes a backend by its name; see make_backend.
using BackendFactory = std::function<c10::intrusive_ptr<c10d::Backend>(const std::string& name,
                                                                       const BackendOptions&)>;

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
  /// hierarchical: divides this host further, for ranks that are to count as of several; see
  /// host_id.
  std::string host = {};
  DebugLevel debug = DebugLevel::info;  ///< hierarchical: of its group of all ranks over Gloo.
  BackendFactory factory = {};          ///< hierarchical: makes those that it is built on.
};

/// A backend of this build, and why it cannot be used here if so.
struct BackendInfo {
  std::string name;
  bool available = false;
  std::string reason;  ///< Why not; empty when available.
  std::string remedy;  ///< What to do about it; empty when available.
};

}  // namespace lockstep
