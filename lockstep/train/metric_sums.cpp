#include "lockstep/train/metric_sums.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

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
    for (const auto& [name, ratio] : of_rank.items()) {
      Ratio& total = all[name];
      total.sum += ratio.at(0).get<double>();
      total.weight += ratio.at(1).get<double>();
    }
  }
  return all;
}

}  // namespace

void MetricSums::add(const MetricSums& other) {
  loss += other.loss;
  loss_terms += other.loss_terms;
  correct += other.correct;
  classified += other.classified;
  samples += other.samples;
  for (const auto& [name, ratio] : other.named) {
    Ratio& total = named[name];
    total.sum += ratio.sum;
    total.weight += ratio.weight;
  }
}

void MetricSums::note(const std::string& name, double sum, double weight) {
  if (name == "loss") {
    loss += sum;
    loss_terms += std::llround(weight);
  } else if (name == "accuracy") {
    correct += sum;
    classified += std::llround(weight);
  } else {
    Ratio& total = named[name];
    total.sum += sum;
    total.weight += weight;
  }
}

std::map<std::string, double> MetricSums::values(const std::string& prefix) const {
  std::map<std::string, double> values{{prefix + "loss", loss},
                                       {prefix + "loss_terms", static_cast<double>(loss_terms)},
                                       {prefix + "correct", correct},
                                       {prefix + "classified", static_cast<double>(classified)},
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
  sums.loss = value("loss");
  sums.loss_terms = static_cast<int64_t>(value("loss_terms"));
  sums.correct = value("correct");
  sums.classified = static_cast<int64_t>(value("classified"));
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
      at::tensor({mine.loss, static_cast<double>(mine.loss_terms), mine.correct,
                  static_cast<double>(mine.classified), static_cast<double>(mine.samples),
                  static_cast<double>(mine.named.size())},
                 at::device(device).dtype(at::kDouble));
  group.all_reduce(wire, ReduceOp::sum);
  const at::Tensor result = wire.cpu();
  const auto* values = result.const_data_ptr<double>();
  MetricSums sums;
  sums.loss = values[0];
  sums.loss_terms = std::llround(values[1]);
  sums.correct = values[2];
  sums.classified = std::llround(values[3]);
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
  if (sums.loss_terms > 0) metrics.loss = sums.loss / static_cast<double>(sums.loss_terms);
  if (sums.classified > 0) metrics.accuracy = sums.correct / static_cast<double>(sums.classified);
  for (const auto& [name, ratio] : sums.named) metrics.values[name] = ratio.sum / ratio.weight;
  return metrics;
}

}  // namespace lockstep
