#include "lockstep/train/kept_state.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/recovery/shared_state.h"
#include "lockstep/train/metric_sums.h"

namespace lockstep::detail {
namespace {

using nlohmann::json;

constexpr const char* kInfo = "info";
constexpr const char* kOfModel = "model.";
constexpr const char* kOfState = "state.";

StateDict flattened(const StoredCheckpoint& kept) {
  const std::string text = to_json(kept.info).dump();
  at::Tensor info = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::memcpy(info.mutable_data_ptr(), text.data(), text.size());
  StateDict all{{kInfo, info}};
  for (const auto& tensor : kept.model)
    all.emplace_back(kOfModel + tensor.name, tensor.parts.front().values);
  for (const auto& tensor : kept.state)
    all.emplace_back(kOfState + tensor.name, tensor.parts.front().values);
  return all;
}

StoredCheckpoint unflattened(const StateDict& all) {
  const at::Tensor& info = all.front().second;
  const auto* const text = static_cast<const char*>(info.const_data_ptr());
  StoredCheckpoint kept;
  kept.info = info_from(json::parse(text, text + info.numel()));
  kept.model = in_memory(whole_shards(with_prefix_removed(all, kOfModel)));
  kept.state = in_memory(whole_shards(with_prefix_removed(all, kOfState)));
  return kept;
}

/// The sums of all ranks, on rank 0.
void gather_sums(const char* name, const World& world, CheckpointInfo& info,
                 const CheckpointInfo* own) {
  const auto mine = own ? MetricSums::from_values(own->values, name) : MetricSums();
  const auto all = reduce_over_ranks(world.group(), world.device(), mine);
  const bool is_first = world.rank() == 0;
  std::erase_if(info.values, [&](const auto& item) {
    return item.first.starts_with(name + std::string("metric."));
  });
  for (const auto& [key, value] : (is_first ? all : MetricSums()).values(name))
    info.values[key] = value;
}

}  // namespace

std::vector<StoredTensor> in_memory(const std::vector<TensorShard>& shards) {
  std::vector<StoredTensor> stored;
  for (const auto& shard : shards) {
    const TensorBox box{shard.offsets, shard.values.sizes().vec()};
    stored.push_back({shard.name,
                      shard.values.scalar_type(),
                      shard.sizes,
                      {{.box = box, .file = {}, .values = shard.values}}});
  }
  return stored;
}

std::shared_ptr<const StoredCheckpoint> share_kept_state(
    const std::shared_ptr<const StoredCheckpoint>& own, const World& world) {
  const json mine = own ? json{{"step", own->info.step}, {"log", own->info.values.at(kLoggedStep)}}
                        : json{{"step", -1}};
  const auto ranks = world.group().all_gather_object(mine);
  const auto first =
      std::find_if(ranks.begin(), ranks.end(), [](const json& rank) { return rank["step"] >= 0; });
  if (first == ranks.end()) return nullptr;
  StoredCheckpoint kept = own ? *own : StoredCheckpoint();
  share_state({{"training",
                {.get = [&] { return flattened(kept); },
                 .set = [&](const StateDict& all) { kept = unflattened(all); }}}},
              {.complete = own != nullptr, .commits = own ? own->info.step : 0}, world.group());
  for (const char* sums : {kEpochSums, kLogSums})
    gather_sums(sums, world, kept.info, own ? &own->info : nullptr);
  // Of the rank that wrote the last log, if it lives.
  kept.info.values[kLoggedStep] = first->at("log").get<double>();
  return std::make_shared<const StoredCheckpoint>(std::move(kept));
}

}  // namespace lockstep::detail
