#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/optim/optim.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep {

/// A row of the table of strategies.
struct StrategyInfo {
  std::string name;     ///< As --strategy takes it.
  std::string summary;  ///< What it spreads, in a few words.
};
std::vector<StrategyInfo> strategy_infos();
std::vector<std::string> strategy_names();

/// The share of the data that a rank of `size` trains on, known before the strategy is made: for
/// its sampler. With logical shards: its shards, of all. Equals Strategy::data_share. Throws as
/// make_strategy.
DataShare data_share(const std::string& name, const StrategyOptions& options, int rank, int size);

/// Whether ranks are stages of a pipeline: by the strategy, or by a dimension pp of the mesh.
bool is_pipeline(const std::string& name, const StrategyOptions& options);

/// Whether each rank has the whole model and the whole optimizer, so that any of them can go on
/// without the others.
bool has_whole_state(const std::string& name, const StrategyOptions& options);

/// Makes a strategy. A collective of `setup.group`. Throws UsageError for an unknown name (with the
/// nearest), for options of other strategies and for what the strategy cannot do with this module.
std::unique_ptr<Strategy> make_strategy(const std::string& name, const StrategySetup& setup);

/// A model and how it is trained, as far as memory goes. Nothing need be there yet.
struct MemoryQuestion {
  int64_t elements = 0;         ///< Of all parameters that are trained.
  int64_t frozen_elements = 0;  ///< Of those that are not.
  int64_t element_bytes = 4;    ///< Of a parameter: 4 for float32.
  /// Of the biggest unit that fsdp gathers at once, and in which dtype's size it does.
  int64_t largest_unit_elements = 0;
  int64_t gathered_element_bytes = 4;
  /// fsdp: the parameters lie once per host, in memory that its ranks share.
  bool shared_memory = false;
  int ranks = 1;
  /// Of the ranks, as StrategyOptions::mesh.
  std::string mesh = {};
  /// Of a pipeline: what the largest stage has of `elements`. 0: stages are of equal size.
  int64_t largest_stage_elements = 0;
  std::string optimizer = "adam";
  OptimizerOptions optimizer_options = {};
};

/// Bytes that one rank needs, the rank that needs most.
struct MemoryAnswer {
  StateBytes state;     ///< What Strategy::state_bytes will say in a step, to about 5%.
  int64_t working = 0;  ///< Buffers in which parameters are gathered and gradients reduced.
  int64_t total() const { return state.total() + working; }
};

/// What training takes on each rank, apart from activations, the program itself and the data. With
/// P parameters in float32, Adam and N ranks the state is 16P bytes for ddp, 8P + 8P/N for zero1,
/// 4P + 12P/N for zero2 and 16P/N for fsdp (Rajbhandari et al., ZeRO, 2020). A pure function.
/// Throws UsageError for a strategy or an optimizer that it does not know, with the nearest, and
/// for numbers below 1.
MemoryAnswer estimate_memory(const std::string& strategy, const MemoryQuestion& question);

/// The strategies that estimate_memory knows: all but dp.
std::vector<std::string> estimated_strategies();

}  // namespace lockstep
