#include "lockstep/parallel/training_mesh.h"

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/words.h"

namespace lockstep::detail {
namespace {

constexpr const char* kPipeline = "pp";
constexpr const char* kData = "dp";
constexpr const char* kReplicate = "dp_replicate";
constexpr const char* kShard = "dp_shard";

const MeshDimension* find(const std::vector<MeshDimension>& mesh, const std::string& name) {
  const auto found = std::ranges::find(mesh, name, &MeshDimension::name);
  return found == mesh.end() ? nullptr : &*found;
}

[[noreturn]] void refuse(const MeshUse& use, const std::string& mesh, const std::string& why,
                         const std::string& hint) {
  throw UsageError("strategy " + use.strategy + " with mesh '" + mesh + "': " + why, hint);
}

}  // namespace

std::vector<MeshDimension> training_mesh(const MeshUse& use, const std::string& text, int ranks) {
  if (text.empty()) return {{use.pipelines ? kPipeline : use.shards ? kShard : kReplicate, ranks}};
  auto mesh = parse_mesh(text, ranks);
  for (const MeshDimension& dimension : mesh)
    expect_one_of("strategy " + use.strategy + ": mesh '" + text + "': dimension", dimension.name,
                  {kPipeline, kData, kReplicate, kShard});
  if (use.pipelines && !find(mesh, kPipeline))
    refuse(use, text, "there is no dimension pp, for the stages",
           "--mesh dp=2,pp=2 makes two pipelines of two stages each");
  if (find(mesh, kData) && (find(mesh, kShard) || find(mesh, kReplicate)))
    refuse(use, text, "dp stands beside dp_shard or dp_replicate, of which it is one",
           "name both, as in dp_replicate=2,dp_shard=2, or dp alone");
  for (MeshDimension& dimension : mesh) {
    if (dimension.name == kData) dimension.name = use.shards ? kShard : kReplicate;
  }
  const MeshDimension* const shard = find(mesh, kShard);
  const MeshDimension* const replicate = find(mesh, kReplicate);
  if (!use.shards && shard && shard->size > 1)
    refuse(use, text, "dp_shard cuts a model, of which each rank has the whole in this strategy",
           "take strategy zero1, zero2 or fsdp, or dimension dp_replicate");
  if (use.shards && replicate && !shard)
    refuse(use, text, "there is no dimension dp_shard, over which it cuts a model",
           "add it, as in dp_replicate=2,dp_shard=2, or take strategy ddp");
  return mesh;
}

DataShare data_share_of(const std::vector<MeshDimension>& mesh, int rank) {
  // As DeviceMesh lays ranks out: row by row.
  DataShare share;
  for (auto dimension = mesh.rbegin(); dimension != mesh.rend(); ++dimension) {
    if (dimension->name != kPipeline) {
      share.rank += rank % dimension->size * share.size;
      share.size *= dimension->size;
    }
    rank /= dimension->size;
  }
  return share;
}

std::vector<MeshDimension> mesh_by_hosts(const std::vector<std::string>& keys) {
  const auto here = static_cast<size_t>(std::ranges::count(keys, keys.front()));
  bool even = here > 1 && here < keys.size() && keys.size() % here == 0;
  for (size_t rank = 0; rank < keys.size() && even; ++rank) {
    const size_t first = rank / here * here;
    even = keys[rank] == keys[first] && (rank < here || keys[rank] != keys[rank - here]);
  }
  const auto ranks = static_cast<int>(keys.size()), each = static_cast<int>(here);
  if (!even) return {{kShard, ranks}};
  return {{kReplicate, ranks / each}, {kShard, each}};
}

StrategySetup on_data_dimensions(StrategySetup setup, const DeviceMesh& mesh) {
  std::vector<std::string> data;
  for (const MeshDimension& dimension : mesh.dimensions()) {
    if (dimension.name != kPipeline) data.push_back(dimension.name);
  }
  if (mesh.has(kShard) && mesh.has(kReplicate)) {
    setup.shard_group = mesh.get_group(kShard);
    setup.replicate_group = mesh.get_group(kReplicate);
  }
  setup.group = mesh.flatten(data);
  return setup;
}

}  // namespace lockstep::detail
