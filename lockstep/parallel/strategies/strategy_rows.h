#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/strategies/strategies.h"
#include "lockstep/parallel/whole_model.h"

namespace lockstep::detail {

/// A row of the table of strategies.
struct StrategyRow {
  StrategyInfo info;
  /// Its options, by the words of messages.
  std::vector<std::string> takes;
  /// How it places a model on ranks that train on different data. Null: `make` does all.
  MakeRow make_row = nullptr;
  std::unique_ptr<Strategy> (*make)(const StrategySetup& setup) = nullptr;
  /// What is cut over dp_shard. All else each rank has whole.
  struct Cuts {
    bool parameters = false;
    bool gradients = false;
    bool optimizer = false;
    bool any() const { return parameters || gradients || optimizer; }
  } cuts = {};
  bool pipelines = false;  ///< Ranks are stages unless a mesh says otherwise.
  bool by_hosts = false;   ///< It cuts a model within hosts unless a mesh says otherwise.
};

const std::vector<StrategyRow>& strategy_rows();
/// Throws UsageError for an unknown name, with the nearest.
const StrategyRow& strategy_row(const std::string& name);

}  // namespace lockstep::detail
