#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/flat_unit.h"
#include "lockstep/parallel/gradient_reducer.h"

namespace lockstep::detail {

struct ShardReducerOptions {
  /// Begins messages.
  std::string what = {};
  /// Of the collectives, in errors about them: a CallOrigin's literal.
  const char* caller = "";
  /// To reduce in. Undefined: the gradients' own.
  std::optional<at::ScalarType> dtype = {};
  /// Bytes of all ranks' shards that are packed and sent at a time. Less memory, more calls.
  int64_t chunk_bytes = std::numeric_limits<int64_t>::max();
  /// Units are reduced in the opposite of their order, always: gradients may be missing, so no rank
  /// sees in which order all come.
  bool fixed_order = false;
  /// Where means are kept. Undefined: where the parameters are.
  std::optional<c10::Device> device = {};
  /// Ranks that have the same shard in other replicas, where there are such: means are over these
  /// too. Replica 0 is the one of their rank 0. The group's size is the same in each replica.
  ProcessGroup replicate = {};
};

/// A reduce-scatter for each unit: each element's mean is on the rank that updates it. Whole
/// gradients are let go as soon as they have been packed.
///
/// Units are reduced in one order on all ranks: at first the opposite of theirs, then that in which
/// rank 0's were complete in its first round, of replica 0. Two chunks are under way at a time.
/// Means add to the gradients that parts have.
class ShardReducer : public GradientReducer {
 public:
  /// `units` are even. `parameters`: those of the units that get a gradient, in the order of their
  /// indices here. `parts`: what this rank's optimizer updates, by the units' own indices; a
  /// vector, or the whole in its shape.
  ShardReducer(const std::vector<FlatUnit>& units, const std::vector<ReducedParameter>& parameters,
               const std::vector<at::Tensor>& parts, const ProcessGroup& group,
               ShardReducerOptions options);

  /// This rank's means by unit, as vectors: what the parts' gradients are views of, with zeros
  /// between them. Empty before the first round and after `drop`.
  std::vector<at::Tensor> means() const;
  /// The parts have no gradients any more. Memory is kept for the next round.
  void drop();
  int64_t bytes() const;
  /// Units that were reduced so far.
  int64_t reductions() const { return reductions_; }

 private:
  struct Unit {
    std::vector<FlatParameter> members = {};  ///< Those that get a gradient.
    int64_t shard_size = 0;
    at::TensorOptions options = {};  ///< Of the mean.
    std::vector<size_t> parts = {};
    at::Tensor mean = {};  ///< This rank's shard.
    bool adds = false;     ///< To what `mean` has.
  };
  struct UpdatedPart {
    at::Tensor tensor;
    size_t unit;
    int64_t offset;        ///< In the mean.
    at::Tensor cut = {};   ///< Of the mean.
    uint32_t version = 0;  ///< When it got its gradient: a step changes it.
  };
  /// A chunk on its way.
  struct Chunk {
    at::Tensor staged;
    at::Tensor result;
    at::Tensor target;  ///< In the unit's mean.
    bool adds;
  };

  void begin_round() override { chunks_.clear(); }
  void reduce(size_t index, bool wait) override;
  void deliver() override;
  void learn_order();
  void adopt_gradients(Unit& unit);
  void pack(const Unit& unit, const std::vector<at::Tensor>& gradients, int64_t begin,
            const at::Tensor& target) const;
  at::Tensor ordered_gradient(const FlatParameter& member) const;
  void make_buffers();
  int64_t chunk_of(const Unit& unit) const;
  at::ScalarType dtype_of(const Unit& unit) const;
  void receive(size_t most_under_way);
  void tell_if_kept(const UpdatedPart& part);

  std::vector<Unit> units_;
  std::vector<UpdatedPart> parts_;
  const ShardReducerOptions options_;
  std::vector<at::Tensor> buffers_;  ///< To pack into, in turn.
  size_t turn_ = 0;
  std::deque<Chunk> chunks_;  ///< Of what is under way.
  bool has_means_ = false;
  bool told_kept_ = false;
  int64_t reductions_ = 0;
};

}  // namespace lockstep::detail
