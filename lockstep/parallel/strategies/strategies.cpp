#include "lockstep/parallel/strategies/strategies.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/comm/shared_memory/host_key.h"
#include "lockstep/parallel/data_parallel/data_parallel.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/logical_shards.h"
#include "lockstep/parallel/pipeline/pipeline_strategy.h"
#include "lockstep/parallel/training_mesh.h"
#include "lockstep/parallel/whole_model.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"

namespace lockstep {
namespace {

struct Row {
  StrategyInfo info;
  /// How it places a model on ranks that train on different data. Null: `make` does all.
  detail::MakeRow make_row;
  std::unique_ptr<Strategy> (*make)(const StrategySetup& setup) = nullptr;
  bool shards = false;     ///< It cuts the model over dp_shard.
  bool pipelines = false;  ///< Ranks are stages unless a mesh says otherwise.
  bool by_hosts = false;   ///< It cuts a model within hosts unless a mesh says otherwise.
};

/// Adding a strategy adds its folder, and a line here.
const std::vector<Row>& rows() {
  static const std::vector<Row> rows{
      {{"ddp", "every rank has the whole model; gradients are averaged"}, detail::make_ddp_row},
      {{"dp", "one process: a replica for each device or core takes a part of each batch"},
       nullptr,
       make_dp_strategy},
      {{"zero1", "ddp, with the optimizer's state shared out to the ranks"},
       detail::make_zero1_row,
       nullptr,
       /*shards=*/true},
      {{"zero2", "zero1, and each rank keeps the gradients of its part only"},
       detail::make_zero2_row,
       nullptr,
       /*shards=*/true},
      {{"pipeline", "ddp with mesh pp=N: each rank has some layers; micro-batches go through them"},
       detail::make_ddp_row,
       nullptr,
       /*shards=*/false,
       /*pipelines=*/true},
      {{"fsdp", "parameters, gradients and the optimizer's state are sharded"},
       detail::make_fsdp_row,
       nullptr,
       /*shards=*/true,
       /*pipelines=*/false,
       /*by_hosts=*/true},
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
  if (options.mesh.empty()) return;
  if (options.logical_shards > 0)
    throw UsageError("logical shards go with no mesh (" + options.mesh + ")",
                     "leave one of the two out");
  if (!row.make_row)
    throw UsageError(
        "strategy " + row.info.name + " takes no mesh (" + options.mesh + "): it has one process",
        "leave the mesh out, or take strategy ddp, zero1, zero2 or fsdp");
}

std::vector<MeshDimension> mesh_of(const Row& row, const StrategyOptions& options, int ranks) {
  return detail::training_mesh({row.info.name, row.shards, row.pipelines}, options.mesh, ranks);
}

/// Between hosts a gather in each forward and backward costs more than the memory of a replica.
std::vector<MeshDimension> mesh_by_hosts(const ProcessGroup& group) {
  const auto keys = group.all_gather_object(host_key());
  auto mesh = detail::mesh_by_hosts({keys.begin(), keys.end()});
  if (mesh.size() > 1 && group.rank() == 0)
    log_info("the model is cut within each host and replicated over hosts (--mesh " +
             mesh_text(mesh) + "); --mesh dp_shard=-1 cuts it over all ranks");
  return mesh;
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
  const Row& row = row_of(name);
  check_options(row, setup.options);
  if (!setup.make_optimizer)
    throw UsageError("strategy " + name + ": StrategySetup::make_optimizer is not set");
  if (!setup.group) throw UsageError("strategy " + name + ": the process group is null");
  if (setup.options.logical_shards > 0) return make_sharded_batch_strategy(setup);
  if (!row.make_row) return row.make(setup);
  auto dimensions = mesh_of(row, setup.options, setup.group.size());
  if (row.by_hosts && setup.options.mesh.empty()) dimensions = mesh_by_hosts(setup.group);
  const DeviceMesh mesh(setup.group, dimensions);
  if (mesh.has("pp")) return detail::make_pipeline(name, setup, mesh, row.make_row);
  return row.make_row(detail::on_data_dimensions(setup, mesh), /*micro_batches=*/false);
}

bool is_pipeline(const std::string& name, const StrategyOptions& options) {
  const auto dimensions = split(options.mesh, ',');
  return row_of(name).pipelines || std::ranges::any_of(dimensions, [](const std::string& text) {
           return text.starts_with("pp=");
         });
}

bool has_whole_state(const std::string& name, const StrategyOptions& options) {
  return !row_of(name).shards && options.logical_shards == 0 && !is_pipeline(name, options);
}

DataShare data_share(const std::string& name, const StrategyOptions& options, int rank, int size) {
  const Row& row = row_of(name);
  check_options(row, options);
  if (options.logical_shards > 0) {
    return share_of(shards_of_rank(options.logical_shards, rank, size), options.logical_shards);
  }
  return row.make_row ? detail::data_share_of(mesh_of(row, options, size), rank)
                      : DataShare{rank, size};
}

}  // namespace lockstep
