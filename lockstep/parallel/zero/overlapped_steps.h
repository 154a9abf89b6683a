#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <unordered_map>
#include <vector>

#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/zero/sharded_optimizer.h"

namespace lockstep::detail {

/// A communication hook of DistributedDataParallel that averages a bucket's gradients and then
/// updates the bucket's parameters. While one bucket is averaged, the one before it is updated and
/// shared. All ranks make the same calls in the same order. On the thread that runs backward.
class OverlappedSteps {
 public:
  explicit OverlappedSteps(ShardedOptimizer& optimizer);

  /// Begins with the bucket. What it returns is called at the end of backward.
  std::function<at::Tensor()> begin(const ProcessGroup& group, GradientBucket& bucket);

 private:
  struct Averaged {
    Work work;
    at::Tensor gradients;
    std::vector<size_t> parameters;
  };

  void finish_open();

  ShardedOptimizer& optimizer_;
  std::unordered_map<const c10::TensorImpl*, size_t> index_of_;
  std::optional<Averaged> open_;  ///< The bucket that is not updated yet.
  std::vector<Work> shared_;
};

}  // namespace lockstep::detail
