#pragma once

#include <map>
#include <string>
#include <vector>

#include "lockstep/comm/tensor_shard.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/fsdp/sharded_parameters.h"
#include "lockstep/parallel/spread_state.h"

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

/// See Strategy::model_shards and Strategy::needed_of_model.
std::vector<TensorShard> model_shards(const torch::nn::Module& module,
                                      const ShardedParameters& parameters);
std::map<std::string, std::vector<TensorBox>> needed_of_model(const torch::nn::Module& module,
                                                              const ShardedParameters& parameters);

/// How a state of the whole module's parameters is spread: by the indices of its parameters(),
/// each counted once.
StateSpread spread_of(const ShardedParameters& parameters);

}  // namespace lockstep::detail
