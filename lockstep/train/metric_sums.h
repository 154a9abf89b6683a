#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/train/callback.h"

namespace lockstep {

/// A mean, as a sum and what it is divided by.
struct Ratio {
  double sum = 0;
  double weight = 0;

  void add(const Ratio& other) {
    sum += other.sum;
    weight += other.weight;
  }
};

/// Sums from which means come: a loss, an accuracy and what else a module notes. They are exact
/// over any number of batches and ranks, because counts are whole (exact in a double up to 2^53)
/// and each sample is added once.
struct MetricSums {
  Ratio loss = {};      ///< Over samples or their tokens; for mean squared error over elements.
  Ratio accuracy = {};  ///< Right predictions over samples, or tokens, that have a class.
  int64_t samples = 0;
  std::map<std::string, Ratio> named = {};

  void add(const MetricSums& other);
  /// Adds to the loss, the accuracy or what else is meant by the name.
  void note(const std::string& name, double sum, double weight);

  /// Numbers for a checkpoint, by names that start with `prefix`; and the sums that they are of.
  std::map<std::string, double> values(const std::string& prefix) const;
  static MetricSums from_values(const std::map<std::string, double>& values,
                                const std::string& prefix);
};

/// The sums of all ranks, on all ranks: one all-reduce in double. Where a rank has named ones,
/// their names and sums are exchanged too, and added in the order of ranks. `device` is where the
/// group's backend communicates.
MetricSums reduce_over_ranks(const ProcessGroup& group, c10::Device device, const MetricSums& mine);

/// The sums of each of a rank's logical shards, in their order. Without shards there is one.
using ShardSums = std::vector<MetricSums>;

/// Adds shard by shard. Either may be empty.
void add_sums(ShardSums& sums, const ShardSums& more);

/// The sums of all `shards` shards, by the tree of LogicalShards, on all ranks. 0: those of all
/// ranks. A collective.
MetricSums reduce_over_shards(const ProcessGroup& group, c10::Device device, const ShardSums& mine,
                              int64_t shards);

/// NaN where there is nothing to divide by.
Metrics metrics_of(const MetricSums& sums);

}  // namespace lockstep
