#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/gradient_tracker.h"

namespace lockstep::detail {

/// A parameter, with what a reducer wants to know of it where it gets a gradient.
struct ReducedParameter {
  std::string name;
  at::Tensor tensor;
  bool sparse_gradient = false;
};

/// Averages gradients over a group's ranks while backward runs, as a GradientTracker says that they
/// come. One backward at a time.
class GradientReducer {
 public:
  virtual ~GradientReducer() = default;
  virtual ArrivalRules rules() const { return {}; }
  /// Whether it has hooks of its own at the nodes that add gradients when it is made.
  virtual bool has_hooks() const { return false; }
  /// Before a forward that records a graph. `synchronizing`: its backward will be reduced. May make
  /// the buckets anew, which is a collective.
  virtual void before_forward(bool synchronizing) = 0;
  /// Whether `before_backward` must see the forward's outputs.
  virtual bool wants_outputs() const { return false; }
  /// After such a forward. May replace the outputs.
  virtual void before_backward(std::vector<at::Tensor>& outputs, bool synchronizing) {}
  /// The first gradient that is to be reduced has come, and is in its parameter. Several backwards
  /// may follow one forward, or none have gone before: then it does what `before_forward` does.
  virtual void begin() = 0;
  /// The gradient of the parameter is complete. With the last one all are reduced.
  virtual void take(size_t index) = 0;
  /// Backward has ended, where `rules` let gradients be missing.
  virtual void end_backward() {}
  /// How many forwards the backward that has ended used up.
  virtual int64_t used_forwards() const { return 1; }
  virtual void fill(DdpStatistics& statistics) const {}
  /// In a Join only: from the next backward on gradients are divided by this, at first by the
  /// group's size.
  virtual void set_divisor(int divisor) {}
  /// In a Join only, in place of a backward that the other ranks run: adds zeros to the sums, and
  /// takes the results as gradients. With `before_forward` before it.
  virtual void reduce_zeros() {}
};

/// The options' choice. A collective.
std::unique_ptr<GradientReducer> make_gradient_reducer(
    const std::vector<ReducedParameter>& parameters, const ProcessGroup& group,
    const DdpOptions& options);

/// c10d::Reducer.
std::unique_ptr<GradientReducer> make_c10d_reducer(const std::vector<ReducedParameter>& parameters,
                                                   const ProcessGroup& group,
                                                   const DdpOptions& options);
/// Our own: for dense gradients of real numbers on the CPU, every parameter used, no hook.
std::unique_ptr<GradientReducer> make_bucket_reducer(
    const std::vector<ReducedParameter>& parameters, const ProcessGroup& group,
    const DdpOptions& options);

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

/// Bytes of the options' caps: of the first bucket, and of all others, which is at least as much.
std::vector<size_t> bucket_caps(const DdpOptions& options);

}  // namespace lockstep::detail
