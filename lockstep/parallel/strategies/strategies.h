#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/strategy.h"

namespace lockstep {

/// A row of the table of strategies.
struct StrategyInfo {
  std::string name;     ///< As --strategy takes it.
  std::string summary;  ///< What it spreads, in a few words.
};
const std::vector<StrategyInfo>& strategy_infos();
std::vector<std::string> strategy_names();

/// The share of the data that a rank of `size` trains on, known before the strategy is made: for
/// its sampler. With logical shards: its shards, of all. Equals Strategy::data_share. Throws as
/// make_strategy.
DataShare data_share(const std::string& name, const StrategyOptions& options, int rank, int size);

/// Makes a strategy. A collective of `setup.group`. Throws UsageError for an unknown name (with the
/// nearest) and for what the strategy cannot do with this module or these options.
std::unique_ptr<Strategy> make_strategy(const std::string& name, const StrategySetup& setup);

}  // namespace lockstep
