#include "lockstep/train/kept_state.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/train/metric_sums.h"

namespace lockstep::detail {
namespace {

using nlohmann::json;

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

std::shared_ptr<const StoredCheckpoint> share_kept_state(
    const std::shared_ptr<const StoredCheckpoint>& own, const World& world) {
  const ProcessGroup& group = world.group();
  const int64_t own_step = own ? own->info.step : -1;
  const auto ranks = group.all_gather_object(
      {{"step", own_step}, {"log", own ? own->info.values.at(kLoggedStep) : 0}});
  const auto step_of = [](const json& rank) { return rank.at("step").get<int64_t>(); };
  const auto source =
      std::max_element(ranks.begin(), ranks.end(),
                       [&](const json& a, const json& b) { return step_of(a) < step_of(b); });
  if (step_of(*source) < 0) return nullptr;
  StoredCheckpoint kept = own ? *own : StoredCheckpoint();
  const auto is_furthest = [&](const json& rank) { return step_of(rank) == step_of(*source); };
  if (!std::all_of(ranks.begin(), ranks.end(), is_furthest)) {
    auto theirs = shared(group, kept, static_cast<int>(source - ranks.begin()), world.device());
    if (own_step < step_of(*source)) kept = std::move(theirs);
  }
  for (const char* sums : {kEpochSums, kLogSums})
    gather_sums(sums, world, kept.info, own ? &own->info : nullptr);
  // Of the rank that wrote the last log, if it lives.
  const auto first = std::find_if(ranks.begin(), ranks.end(),
                                  [&](const json& rank) { return step_of(rank) >= 0; });
  kept.info.values[kLoggedStep] = first->at("log").get<double>();
  return std::make_shared<const StoredCheckpoint>(std::move(kept));
}

}  // namespace lockstep::detail
