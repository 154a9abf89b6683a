#pragma once

#include <string>
#include <vector>

#include "lockstep/optim/optim.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/fsdp/sharded_parameters.h"

namespace torch::nn {
class Module;
}

namespace lockstep::detail {

/// The whole module's state from all ranks' shards, on rank 0. A collective.
StateDict gather_model_state(const torch::nn::Module& module, const ShardedParameters& parameters);
/// Puts this rank's part of a whole state into its shards, and buffers into the module. Throws
/// CheckpointError naming what does not fit, and then changes nothing.
void load_model_state(torch::nn::Module& module, const ShardedParameters& parameters,
                      const StateDict& state, const std::string& source);

/// See FullyShardedDataParallel::sharded_state_dict.
std::vector<Shard> shards_of(const torch::nn::Module& module, const ShardedParameters& parameters);
void load_shards(torch::nn::Module& module, const ShardedParameters& parameters,
                 const std::vector<Shard>& given, const std::string& source);

/// What an optimizer of shards updates: number i of its tensors is this part of a parameter.
struct OptimizedPiece {
  Piece piece;
  size_t parameter_index;  ///< In the module's parameters(), each counted once.
};

/// Pieces, and what there is of them, by their index.
struct PiecesState {
  std::vector<OptimizedPiece> pieces;
  StateDict state;
};

/// The whole optimizer's state, on rank 0, from `own` of each rank. A collective.
StateDict gather_optimizer_state(const ShardedParameters& parameters,
                                 const std::vector<PiecesState>& own);
/// This rank's part of a whole state. Throws CheckpointError naming an entry that does not fit.
StateDict own_optimizer_state(const ShardedParameters& parameters,
                              const std::vector<OptimizedPiece>& pieces, const StateDict& whole,
                              const std::string& source);

}  // namespace lockstep::detail
