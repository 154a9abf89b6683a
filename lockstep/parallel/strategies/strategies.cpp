#include "lockstep/parallel/strategies/strategies.h"

#include "lockstep/base/error.h"
#include "lockstep/base/words.h"
#include "lockstep/parallel/data_parallel/data_parallel.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/logical_shards.h"
#include "lockstep/parallel/pipeline/pipeline_strategy.h"
#include "lockstep/parallel/whole_model.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"

namespace lockstep {
namespace {

struct Row {
  StrategyInfo info;
  std::unique_ptr<Strategy> (*make)(const StrategySetup& setup);
  /// Null where every rank has a share of its own.
  DataShare (*share)(const StrategyOptions& options, int rank, int size) = nullptr;
  /// Whether ranks may have several dimensions.
  bool takes_mesh = false;
};

/// Adding a strategy adds its folder, and a line here.
const std::vector<Row>& rows() {
  static const std::vector<Row> rows{
      {{"ddp", "every rank has the whole model; gradients are averaged"},
       [](const StrategySetup& setup) {
         return setup.options.logical_shards > 0 ? make_sharded_batch_strategy(setup)
                                                 : make_ddp_strategy(setup);
       }},
      {{"dp", "one process: a replica for each device or core takes a part of each batch"},
       [](const StrategySetup& setup) { return make_dp_strategy(setup); }},
      {{"zero1", "ddp, with the optimizer's state shared out to the ranks"},
       [](const StrategySetup& setup) { return make_zero1_strategy(setup); }},
      {{"zero2", "zero1, and each rank keeps the gradients of its part only"},
       [](const StrategySetup& setup) { return make_zero2_strategy(setup); }},
      {{"pipeline", "each rank has some layers; micro-batches go through them"},
       make_pipeline_strategy,
       pipeline_data_share,
       /*takes_mesh=*/true},
      {{"fsdp", "parameters, gradients and the optimizer's state are sharded"},
       [](const StrategySetup& setup) { return make_fsdp_strategy(setup); }},
  };
  return rows;
}

const Row& row_of(const std::string& name) {
  for (const Row& row : rows()) {
    if (row.info.name == name) return row;
  }
  throw UsageError(unknown_word("strategy", name, strategy_names()));
}

/// Dimensions or shards that a strategy would not look at are a mistake.
void check_options(const Row& row, const StrategyOptions& options) {
  if (options.logical_shards > 0 && row.info.name != "ddp") {
    throw UsageError("strategy " + row.info.name + " takes no logical shards",
                     "take strategy ddp, or leave the shards out");
  }
  if (options.mesh.empty() || row.takes_mesh) return;
  throw UsageError("strategy " + row.info.name + " takes no mesh (" + options.mesh +
                       "): all its ranks are one dimension",
                   "leave the mesh out, or take a strategy that combines with others: pipeline");
}

}  // namespace

std::vector<StrategyInfo> strategy_infos() {
  std::vector<StrategyInfo> all;
  for (const Row& row : rows()) all.push_back(row.info);
  return all;
}

std::vector<std::string> strategy_names() {
  std::vector<std::string> names;
  for (const StrategyInfo& info : strategy_infos()) names.push_back(info.name);
  return names;
}

std::unique_ptr<Strategy> make_strategy(const std::string& name, const StrategySetup& setup) {
  check_options(row_of(name), setup.options);
  if (!setup.make_optimizer)
    throw UsageError("strategy " + name + ": StrategySetup::make_optimizer is not set");
  return row_of(name).make(setup);
}

DataShare data_share(const std::string& name, const StrategyOptions& options, int rank, int size) {
  const Row& row = row_of(name);
  check_options(row, options);
  if (options.logical_shards > 0) {
    return share_of(shards_of_rank(options.logical_shards, rank, size), options.logical_shards);
  }
  return row.share ? row.share(options, rank, size) : DataShare{rank, size};
}

}  // namespace lockstep
