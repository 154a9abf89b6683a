#pragma once

#include <string>
#include <vector>

#include "lockstep/parallel/device_mesh.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::detail {

/// What a strategy does with the dimensions of a mesh.
struct MeshUse {
  std::string strategy;    ///< Its name, for messages.
  bool shards = false;     ///< It cuts the model over dp_shard.
  bool pipelines = false;  ///< Ranks are stages where no mesh is given: "pipeline".
};

/// The dimensions over which `ranks` train, by the names of torchtitan: pp, the stages of a
/// pipeline; dp_replicate, replicas of the model; dp_shard, ranks among which it is cut. dp is
/// dp_shard for a strategy that shards, else dp_replicate. Empty text: all ranks are dp, or pp.
/// Throws UsageError as parse_mesh, and where a dimension and the strategy do not go together.
std::vector<MeshDimension> training_mesh(const MeshUse& use, const std::string& text, int ranks);

/// The share of the data of a rank: ranks that differ in pp alone have the same.
DataShare data_share_of(const std::vector<MeshDimension>& mesh, int rank);

/// dp_replicate over hosts and dp_shard within each, where there are several hosts of the same
/// number of ranks, above 1. Else dp_shard over all ranks. `host_keys`: each rank's, see host_key.
std::vector<MeshDimension> mesh_by_hosts(const std::vector<std::string>& host_keys);

/// The setup for the ranks that train on different data with this rank's part of the model: its
/// groups are those of the mesh. A collective.
StrategySetup on_data_dimensions(StrategySetup setup, const DeviceMesh& mesh);

}  // namespace lockstep::detail
