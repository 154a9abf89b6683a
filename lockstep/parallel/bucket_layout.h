#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/parallel/ddp.h"

namespace lockstep::detail {

/// Buckets as lists of parameters, in the order in which they are reduced.
using BucketLayout = std::vector<std::vector<size_t>>;

/// The buckets that Python's DistributedDataParallel starts with: one for the first step, unless
/// parameters may go unused. The true order of gradients is known only after that step. A bucket
/// started early could then cross other collectives of backward. Throws UsageError for caps that
/// are not above 0.
BucketLayout first_layout(const std::vector<at::Tensor>& parameters,
                          const std::vector<bool>& sparse, const DdpOptions& options);

/// The buckets from the second step on: parameters in the `order` in which gradients came.
BucketLayout layout_by_arrival(const std::vector<at::Tensor>& parameters,
                               const std::vector<size_t>& order, const DdpOptions& options);

/// Rank 0's layout, for all. The messages are those of c10d's reducer. A collective.
BucketLayout agree_on_layout(const BucketLayout& layout, const ProcessGroup& group);

/// Bytes of the options' caps. The first is at most the other.
struct BucketCaps {
  int64_t first;
  int64_t rest;
};
BucketCaps bucket_caps(const DdpOptions& options);

}  // namespace lockstep::detail
