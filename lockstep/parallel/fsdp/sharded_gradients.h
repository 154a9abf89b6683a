#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/parallel/fsdp/sharded_parameters.h"
#include "lockstep/parallel/fsdp/watched_memory.h"
#include "lockstep/parallel/gradient_tracker.h"
#include "lockstep/parallel/shard_reducer.h"

namespace lockstep::detail {

/// Keeps the gradients of shards from being used while they only add up. An optimizer would else
/// find none, step without them, and nobody would know. Meanwhile each shard has a gradient without
/// values. What uses one throws UsageError.
class WithheldGradients final : private MemoryWatcher {
 public:
  /// `place` begins the error. The shards must outlive this.
  WithheldGradients(const std::vector<at::Tensor>& shards, std::string place)
      : shards_(shards), place_(std::move(place)) {}

  void withhold();
  /// Gives the shards the gradients that they had. One whose gradient was dropped or replaced
  /// meanwhile keeps that.
  void release();

 private:
  void before_use(const std::vector<size_t>& memories) override;

  const std::vector<at::Tensor>& shards_;
  const std::string place_;
  WatchedMemory memory_{*this, 0, 1, at::kFloat, c10::kCPU};
  /// What the shards have for a gradient, and had before. Empty while nothing is withheld.
  std::vector<at::Tensor> stand_ins_, before_;
};

/// Averages the gradients of a module's units over ranks while backward runs, into shards. A unit's
/// parameters are freed when its gradients are there.
class ShardedGradients : private GradientTracker {
 public:
  /// `pieces`: what the optimizer updates, one for each of `parameters.pieces()` that needs a
  /// gradient, in that order. They get gradients.
  ShardedGradients(ShardedParameters& parameters, const std::vector<at::Tensor>& pieces,
                   const ProcessGroup& replicate, const FsdpOptions& options);

  /// Whether the backwards to come reduce gradients. Without it they add up in the module's.
  bool& synchronizing() { return synchronizing_; }
  /// A forward of a program's own loop has ended, of which a backward is to come. After the first
  /// backward the module's own parameters have gradients whose use is a UsageError, until the next
  /// forward: an optimizer of those would step without gradients, and nobody would know.
  void expect_backward() { ++expected_; }
  /// Takes those back.
  void allow_module();
  /// Before a forward. Goes on with parameters that have new nodes which add gradients. Throws
  /// UsageError for one that was frozen or unfrozen.
  void follow_module();
  /// Whether gradients wait in the module that were not reduced.
  bool has_local() const;
  /// Names of the parameters that a backward left without a gradient; empty when it is complete.
  std::vector<std::string> missing_names() const;
  /// Reduces what backwards without synchronizing have left in the module. Throws UsageError for a
  /// parameter without a gradient, unless parameters may be unused.
  void reduce_accumulated();
  /// Drops what an incomplete backward has left.
  void drop_incomplete();
  /// Bytes of gradients that this rank keeps.
  int64_t bytes() const;
  int64_t reductions() const { return reducer_.reductions(); }

 private:
  void on_backward(size_t index) override;
  bool begin_round() override;
  void take(size_t index) override;
  void end_round() override { complete_ = true; }
  void refuse_second(size_t index, bool same_backward, const std::vector<size_t>& missing) override;
  void on_end();
  void refuse_module();
  std::string place() const;

  ShardedParameters& parameters_;
  const bool find_unused_;
  const std::vector<ReducedParameter> trained_;  ///< The module's that need a gradient.
  const std::vector<at::Tensor> pieces_;
  WithheldGradients withheld_;
  ShardReducer reducer_;
  bool complete_ = false;  ///< All gradients have come in this backward or before.
  bool synchronizing_ = true;
  int64_t expected_ = 0;  ///< Backwards.
  bool keeps_graph_ = false;
  bool refuses_module_ = false;
  bool has_refused_ = false;
};

}  // namespace lockstep::detail
