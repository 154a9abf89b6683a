#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/spread_state.h"
#include "lockstep/parallel/strategy.h"
#include "lockstep/parallel/zero/parameter_shards.h"

namespace lockstep::detail {

/// An optimizer of which each rank has the part that updates its parts of the parameters. The
/// indices in its state are those of the parameters.
class ShardedOptimizer {
 public:
  /// `make` is called twice: for tensors without elements, to see what kind of optimizer it makes,
  /// and for the parts. Those may have no elements either. The parameters lie in one bucket for
  /// each dtype and device, so that the parts of a rank lie side by side and few messages share
  /// them. With `small_buckets` they lie in several, of which each rank has an equal part:
  /// UsageError for an optimizer that is not elementwise.
  ShardedOptimizer(std::vector<at::Tensor> parameters, const OptimizerFactory& make,
                   const ProcessGroup& group, std::string what, bool small_buckets = false);

  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  ParameterShards& shards() { return shards_; }
  const ParameterShards& shards() const { return shards_; }
  Optimizer& local() const { return *optimizer_; }

  /// Goes on with values that were put into the parameters since the last step. A collective where
  /// there are such: MismatchError where other ranks have put in others.
  void follow_parameters();
  /// Gives each part its part of the parameter's whole gradient. Throws UsageError for a gradient
  /// that is sparse, and for that of a parameter that was frozen when this was made.
  void take_gradients();
  /// The same for one parameter, from this gradient.
  void take_gradient(size_t parameter, const at::Tensor& gradient);
  /// Steps from the parts' gradients and gives all ranks the new values. A collective.
  void step(const StepScale& scale);
  /// The first half of that, on this rank alone.
  void update(const StepScale& scale);
  void drop_gradients();

  /// By the indices of the parameters, as `local().state()`.
  const SpreadOptimizer& spread() const { return spread_; }
  /// A whole state, the same on every rank. Throws CheckpointError where it does not fit this
  /// rank's part, and then changes nothing. What it has of frozen parameters is kept for `spread`.
  void load_state(const StateDict& whole);

 private:
  std::string what_;  ///< For messages.
  ParameterShards shards_;
  std::unique_ptr<Optimizer> optimizer_;
  SpreadOptimizer spread_;
};

/// Indices of those that need a gradient. Throws UsageError for a tensor that is there twice.
std::vector<size_t> trained_of(const std::vector<at::Tensor>& parameters, const std::string& what);

}  // namespace lockstep::detail
