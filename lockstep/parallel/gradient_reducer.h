#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/ddp.h"

namespace lockstep::detail {

/// A parameter that gets a gradient, with what a reducer wants to know of it.
struct ReducedParameter {
  std::string name;
  at::Tensor tensor;
  bool sparse_gradient = false;
};

/// Averages gradients over a group's ranks while backward runs. One thread at a time, and one
/// backward at a time.
class GradientReducer {
 public:
  virtual ~GradientReducer() = default;
  /// Before a forward that records a graph. `synchronizing`: its backward will be reduced. Throws
  /// UsageError naming the parameters that got no gradient in a backward that reduced others.
  virtual void before_forward(bool synchronizing) = 0;
  /// Whether `before_backward` must see the forward's outputs.
  virtual bool wants_outputs() const { return false; }
  /// After such a forward. May replace the outputs.
  virtual void before_backward(std::vector<at::Tensor>& outputs, bool synchronizing) = 0;
  /// Both of these for a backward that runs already, from the hook of its first gradient. Call it
  /// before the reducer's own hook of that.
  virtual void begin_within_backward() {
    std::vector<at::Tensor> no_outputs;
    before_forward(true);
    before_backward(no_outputs, true);
  }
  /// Gives up a backward that ended with an exception. The next one is like any other. LibTorch's
  /// reducer cannot do it.
  virtual void forget_backward() {}
  virtual void fill(DdpStatistics& statistics) const = 0;
  /// From the next backward on gradients are divided by this, at first by the group's size.
  virtual void set_divisor(int divisor) = 0;
  /// In place of a backward that the other ranks run: adds zeros to the sums, and takes the results
  /// as gradients. With `before_forward` before it.
  virtual void reduce_zeros() = 0;
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

/// The error of a backward that left parameters of these names without a gradient.
[[noreturn]] void throw_unfinished(int rank, const std::vector<std::string>& names);

}  // namespace lockstep::detail
