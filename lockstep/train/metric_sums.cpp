#include "lockstep/train/metric_sums.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "lockstep/base/call_origin.h"
#include "lockstep/parallel/logical_shards.h"
#include "lockstep/parallel/shard_tree.h"

namespace lockstep {
using nlohmann::json;
namespace {

constexpr const char* kNamed = "metric.";

/// Names may differ from rank to rank: each notes what its batches had.
std::map<std::string, Ratio> reduce_named(const ProcessGroup& group,
                                          const std::map<std::string, Ratio>& mine) {
  json object = json::object();
  for (const auto& [name, ratio] : mine) object[name] = {ratio.sum, ratio.weight};
  std::map<std::string, Ratio> all;
  for (const json& of_rank : group.all_gather_object(object)) {
    for (const auto& [name, ratio] : of_rank.items())
      all[name].add({ratio.at(0).get<double>(), ratio.at(1).get<double>()});
  }
  return all;
}

}  // namespace

void MetricSums::add(const MetricSums& other) {
  loss.add(other.loss);
  accuracy.add(other.accuracy);
  samples += other.samples;
  for (const auto& [name, ratio] : other.named) named[name].add(ratio);
}

void MetricSums::note(const std::string& name, double sum, double weight) {
  Ratio& total = name == "loss" ? loss : name == "accuracy" ? accuracy : named[name];
  total.add({sum, weight});
}

std::map<std::string, double> MetricSums::values(const std::string& prefix) const {
  std::map<std::string, double> values{{prefix + "loss", loss.sum},
                                       {prefix + "loss_terms", loss.weight},
                                       {prefix + "correct", accuracy.sum},
                                       {prefix + "classified", accuracy.weight},
                                       {prefix + "samples", static_cast<double>(samples)}};
  for (const auto& [name, ratio] : named) {
    values[prefix + kNamed + name + ".sum"] = ratio.sum;
    values[prefix + kNamed + name + ".weight"] = ratio.weight;
  }
  return values;
}

MetricSums MetricSums::from_values(const std::map<std::string, double>& values,
                                   const std::string& prefix) {
  const auto value = [&](const std::string& name) {
    const auto found = values.find(prefix + name);
    return found == values.end() ? 0.0 : found->second;
  };
  MetricSums sums;
  sums.loss = {value("loss"), value("loss_terms")};
  sums.accuracy = {value("correct"), value("classified")};
  sums.samples = static_cast<int64_t>(value("samples"));
  const std::string start = prefix + kNamed;
  const std::string end = ".sum";
  for (const auto& [name, sum] : values) {
    if (!name.starts_with(start) || !name.ends_with(end)) continue;
    const std::string metric = name.substr(start.size(), name.size() - start.size() - end.size());
    sums.named[metric] = {sum, value(kNamed + metric + ".weight")};
  }
  return sums;
}

MetricSums reduce_over_ranks(const ProcessGroup& group, c10::Device device,
                             const MetricSums& mine) {
  if (group.size() == 1) return mine;
  at::Tensor wire =
      at::tensor({mine.loss.sum, mine.loss.weight, mine.accuracy.sum, mine.accuracy.weight,
                  static_cast<double>(mine.samples), static_cast<double>(mine.named.size())},
                 at::device(device).dtype(at::kDouble));
  const CallOrigin origin("sums of metrics", "Trainer");
  group.all_reduce(wire, ReduceOp::sum);
  const at::Tensor result = wire.cpu();
  const auto* values = result.const_data_ptr<double>();
  MetricSums sums;
  sums.loss = {values[0], values[1]};
  sums.accuracy = {values[2], values[3]};
  sums.samples = std::llround(values[4]);
  if (values[5] > 0) sums.named = reduce_named(group, mine.named);
  return sums;
}

void add_sums(ShardSums& sums, const ShardSums& more) {
  sums.resize(std::max(sums.size(), more.size()));
  for (size_t i = 0; i < more.size(); ++i) sums[i].add(more[i]);
}

MetricSums reduce_over_shards(const ProcessGroup& group, c10::Device device, const ShardSums& mine,
                              int64_t shards) {
  ShardSums own = mine;
  if (shards == 0)
    return reduce_over_ranks(group, device, own.empty() ? MetricSums() : own.front());
  own.resize(shards_of_rank(shards, group.rank(), group.size()).size());
  json values = json::array();
  for (const MetricSums& sums : own) values.push_back(sums.values(""));
  return detail::sum_over_shards<MetricSums>(
      group, values,
      [](const json& of_shard) {
        return MetricSums::from_values(of_shard.get<std::map<std::string, double>>(), "");
      },
      [](MetricSums& left, MetricSums& right) { left.add(right); });
}

Metrics metrics_of(const MetricSums& sums) {
  Metrics metrics;
  metrics.samples = sums.samples;
  if (sums.loss.weight > 0) metrics.loss = sums.loss.sum / sums.loss.weight;
  if (sums.accuracy.weight > 0) metrics.accuracy = sums.accuracy.sum / sums.accuracy.weight;
  for (const auto& [name, ratio] : sums.named) metrics.values[name] = ratio.sum / ratio.weight;
  return metrics;
}

}  // namespace lockstep
