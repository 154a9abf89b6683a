#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/parallel/fsdp/sharded_parameters.h"
#include "lockstep/parallel/fsdp/watched_memory.h"
#include "lockstep/parallel/gradient_tracker.h"

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

/// Averages the gradients of a module's units over ranks while backward runs, into shards.
///
/// When all gradients of a unit are there, they are divided into a flat buffer and freed, and the
/// unit's parameters too. A reduce-scatter of the buffer adds this rank's shard to the gradients of
/// its pieces. Units are reduced in one order on all ranks: at first the opposite of the module's,
/// then that in which rank 0's first gradients came.
class ShardedGradients : private GradientTracker {
 public:
  /// `pieces`: what the optimizer updates, one for each of `parameters.pieces()` that needs a
  /// gradient, in that order. They get gradients.
  ShardedGradients(ShardedParameters& parameters, std::vector<at::Tensor> pieces,
                   const FsdpOptions& options);

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
  /// Drops what an incomplete backward has left.
  void drop_incomplete();
  /// Bytes of gradients that this rank keeps.
  int64_t bytes() const;
  int64_t reductions() const { return reductions_; }

 private:
  struct Unit {
    std::vector<size_t> trainable;  ///< Indices of its parameters that need a gradient.
    size_t awaited = 0;             ///< Gradients of those.
    at::Tensor gradient;            ///< This rank's shard, with pieces' gradients in it.
    std::vector<size_t> pieces;     ///< Indices of this rank's.
  };
  /// A reduction that is under way.
  struct Reduction {
    size_t unit;
    at::Tensor staged;
    at::Tensor result;
    Work work;
  };
  /// A parameter that needs a gradient.
  struct Member {
    size_t unit;
    size_t parameter;  ///< In the unit.
  };

  void on_backward(size_t index) override;
  bool begin_round() override;
  void take(size_t index) override;
  void end_round() override { complete_ = true; }
  void refuse_second(size_t index, bool same_backward, const std::vector<size_t>& missing) override;
  void on_end();
  void refuse_module();
  const FlatParameter& parameter(size_t index) const;
  void reduce_in_turn();
  void reduce(size_t unit, bool wait);
  void stage(const Unit& unit, size_t index, const at::Tensor& staged);
  at::Tensor staging_buffer(size_t unit);
  void tell_if_kept(size_t piece);
  void take_result(Reduction reduction);
  void agree_on_order();
  at::ScalarType reduce_dtype(size_t unit) const;
  std::string place() const;

  ShardedParameters& parameters_;
  const std::vector<at::Tensor> pieces_;
  /// Versions of `pieces_` when their gradients were first set: a step changes them.
  std::vector<uint32_t> versions_ = std::vector<uint32_t>(pieces_.size());
  bool told_kept_ = false;
  std::vector<Piece> places_;  ///< Of `pieces_`.
  const std::optional<at::ScalarType> reduce_dtype_;
  const bool find_unused_;
  std::vector<Unit> units_;
  std::vector<size_t> order_;     ///< In which units are reduced.
  std::vector<size_t> arrivals_;  ///< In which they were complete, until the order follows it.
  size_t next_ = 0;               ///< In `order_`.
  bool ordered_ = false;
  bool complete_ = false;  ///< All gradients have come in this backward or before.
  bool synchronizing_ = true;
  int64_t expected_ = 0;  ///< Backwards.
  bool keeps_graph_ = false;
  bool refuses_module_ = false;
  bool has_refused_ = false;
  std::vector<at::Tensor> buffers_;  ///< In turn.
  size_t turn_ = 0;
  std::vector<Reduction> running_;
  int64_t reductions_ = 0;
  WithheldGradients withheld_;
  std::vector<Member> members_;
};

}  // namespace lockstep::detail
