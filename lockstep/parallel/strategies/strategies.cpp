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
#include "lockstep/parallel/strategies/strategy_rows.h"
#include "lockstep/parallel/training_mesh.h"
#include "lockstep/parallel/whole_model.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"

namespace lockstep {
namespace detail {

/// Adding a strategy adds its folder, and a line here.
const std::vector<StrategyRow>& strategy_rows() {
  static const std::vector<StrategyRow> rows{
      {.info = {"ddp", "every rank has the whole model; gradients are averaged"},
       .takes = {"ddp options", "logical shards"},
       .make_row = make_ddp_row},
      {.info = {"dp", "one process: a replica for each device or core takes a part of each batch"},
       .takes = {"dp options"},
       .make = make_dp_strategy},
      {.info = {"zero1", "ddp, with the optimizer's state shared out to the ranks"},
       .takes = {"zero options"},
       .make_row = make_zero1_row,
       .cuts = {.optimizer = true}},
      {.info = {"zero2", "zero1, and each rank keeps the gradients of its part only"},
       .takes = {"zero options"},
       .make_row = make_zero2_row,
       .cuts = {.gradients = true, .optimizer = true}},
      {.info = {"pipeline",
                "ddp over a mesh pp=N: each rank has some layers; micro-batches go "
                "through them"},
       .takes = {},
       .make_row = make_ddp_row,
       .pipelines = true},
      {.info = {"fsdp", "parameters, gradients and the optimizer's state are sharded"},
       .takes = {"fsdp options"},
       .make_row = make_fsdp_row,
       .cuts = {.parameters = true, .gradients = true, .optimizer = true},
       .by_hosts = true},
  };
  return rows;
}

const StrategyRow& strategy_row(const std::string& name) {
  for (const StrategyRow& row : strategy_rows()) {
    if (row.info.name == name) return row;
  }
  throw UsageError(unknown_word("strategy", name, strategy_names()));
}

}  // namespace detail

namespace {

using detail::strategy_row;
using detail::strategy_rows;
using Row = detail::StrategyRow;

bool is_pipeline_row(const Row& row, const std::string& mesh) {
  const auto dimensions = split(mesh, ',');
  return row.pipelines || std::ranges::any_of(dimensions, [](const std::string& text) {
           return text.starts_with("pp=");
         });
}

/// What is set of the options that not every strategy takes.
std::vector<std::string> given(const StrategyOptions& options) {
  std::vector<std::string> names;
  const auto add = [&](bool is_set, const char* name) {
    if (is_set) names.emplace_back(name);
  };
  add(options.ddp.has_value(), "ddp options");
  add(options.zero.has_value(), "zero options");
  add(options.fsdp.has_value(), "fsdp options");
  add(options.pipeline.has_value(), "pipeline options");
  add(options.dp.has_value(), "dp options");
  add(options.logical_shards.has_value(), "logical shards");
  add(!options.mesh.empty(), "mesh");
  return names;
}

bool takes(const Row& row, const std::string& name) {
  return std::find(row.takes.begin(), row.takes.end(), name) != row.takes.end();
}

/// Options that a strategy would not look at are a mistake.
void check_options(const Row& row, const StrategyOptions& options) {
  for (const std::string& name : given(options)) {
    const bool of_pipeline = name == "pipeline options" && is_pipeline_row(row, options.mesh);
    if (of_pipeline || takes(row, name) || (name == "mesh" && row.make_row)) continue;
    std::vector<std::string> owners;
    for (const Row& other : strategy_rows())
      if (takes(other, name)) owners.push_back(other.info.name);
    throw UsageError("strategy " + row.info.name + " takes no " + name,
                     name == "mesh"   ? "leave it out, or take ddp, zero1, zero2 or fsdp"
                     : owners.empty() ? "leave that out, or take a mesh with stages: pp=2"
                                      : "leave that out, or take strategy " + join(owners, " or "));
  }
  if (options.logical_shards && !options.mesh.empty())
    throw UsageError("logical shards go with no mesh (" + options.mesh + ")",
                     "leave one of the two out");
  if (options.ddp && options.logical_shards) {
    throw UsageError("strategy ddp takes no ddp options with logical shards",
                     "leave one of the two out: gradients are summed in the order of the shards");
  }
}

std::vector<MeshDimension> mesh_of(const Row& row, const StrategyOptions& options, int ranks) {
  return detail::training_mesh({row.info.name, row.cuts.any(), row.pipelines}, options.mesh, ranks);
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
  for (const Row& row : strategy_rows()) all.push_back(row.info);
  return all;
}

std::vector<std::string> strategy_names() {
  std::vector<std::string> names;
  for (const StrategyInfo& info : strategy_infos()) names.push_back(info.name);
  return names;
}

std::unique_ptr<Strategy> make_strategy(const std::string& name, const StrategySetup& setup) {
  const Row& row = strategy_row(name);
  check_options(row, setup.options);
  if (!setup.make_optimizer)
    throw UsageError("strategy " + name + ": StrategySetup::make_optimizer is not set");
  if (!setup.group) throw UsageError("strategy " + name + ": the process group is null");
  if (setup.options.logical_shards) return make_sharded_batch_strategy(setup);
  if (!row.make_row) return row.make(setup);
  auto dimensions = mesh_of(row, setup.options, setup.group.size());
  if (row.by_hosts && setup.options.mesh.empty()) dimensions = mesh_by_hosts(setup.group);
  const DeviceMesh mesh(setup.group, dimensions);
  if (mesh.has("pp")) return detail::make_pipeline(name, setup, mesh, row.make_row);
  return row.make_row(detail::on_data_dimensions(setup, mesh), /*micro_batches=*/false);
}

bool is_pipeline(const std::string& name, const StrategyOptions& options) {
  return is_pipeline_row(strategy_row(name), options.mesh);
}

bool has_whole_state(const std::string& name, const StrategyOptions& options) {
  return !strategy_row(name).cuts.any() && !options.logical_shards && !is_pipeline(name, options);
}

DataShare data_share(const std::string& name, const StrategyOptions& options, int rank, int size) {
  const Row& row = strategy_row(name);
  check_options(row, options);
  if (const auto& shards = options.logical_shards)
    return share_of(shards_of_rank(shards->count, rank, size), shards->count);
  return row.make_row ? detail::data_share_of(mesh_of(row, options, size), rank)
                      : DataShare{rank, size};
}

}  // namespace lockstep
