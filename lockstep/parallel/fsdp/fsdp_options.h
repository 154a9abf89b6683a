#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

struct FsdpOptions {
  /// Full names of the modules that are gathered and freed as one unit ("layers.0"), or "h.*" for
  /// all children of h. Empty: by size, so that a transformer's blocks are units.
  std::vector<std::string> units = {};
  /// By size: a module with fewer parameters is no unit of its own. 262,144 of float32 are 1 MiB:
  /// below that, what a gather costs by itself counts for more than its bytes.
  int64_t min_unit_elements = 262'144;
  /// Free a unit after its forward, too. Costs one more gather in backward.
  bool reshard_after_forward = true;
  /// Gather the unit to come while one computes. Costs the memory of one more unit.
  bool prefetch = true;
  /// Keep shards, their gradients and the optimizer's state in the host's memory while the module
  /// is on another device. On the CPU it changes nothing.
  bool cpu_offload = false;
  /// Gather and compute in this dtype. Shards keep the module's. Undefined: the module's.
  std::optional<at::ScalarType> parameter_dtype = {};
  /// Sum gradients over ranks in this dtype. Undefined: that of the gradients.
  std::optional<at::ScalarType> reduce_dtype = {};
  /// Convert floating-point buffers to this dtype. Undefined: they stay.
  std::optional<at::ScalarType> buffer_dtype = {};
  /// Over shared memory keep the whole parameters once per host, and gather nothing. Not with
  /// `parameter_dtype`: then each rank has its own copy in that dtype while it needs it.
  bool share_memory = true;
  /// Parameters without a gradient count as having zeros. Without it they are an error.
  bool find_unused_parameters = false;
  /// Rank 0's buffers go to all ranks before each forward, as with DistributedDataParallel.
  bool broadcast_buffers = true;
  /// Check that the ranks' modules match and take rank 0's values.
  bool init_sync = true;
};

/// What a FullyShardedDataParallel is and has done so far.
struct FsdpStatistics {
  std::vector<std::string> units;      ///< Names of the modules that are units; "" is the whole.
  std::vector<int64_t> unit_elements;  ///< Of each, with what fills the last shard.
  bool shared_memory = false;          ///< Parameters lie once per host.
  int64_t gathers = 0;                 ///< Of a unit, so far.
  int64_t foretold_gathers = 0;        ///< Those that ran ahead.
  int64_t reductions = 0;              ///< Of a unit's gradients, so far.
};

}  // namespace lockstep
