#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace lockstep {

namespace detail {
class GraphWalk;
}

/// A backward in two halves, as zero-bubble pipelines want it (Qi et al. 2023): first the gradient
/// of the input, for which another stage waits, and later, when nobody waits, those of the weights.
/// Together they are `backward(output, gradient)`, to the bit. A node of both halves, such as a
/// linear layer's, runs in each for its own products only.
///
/// Where `backward` would leave the graph to LibTorch's engine (CUDA, hooks), and where something
/// in it is checkpointed, the first half is the whole backward and the second nothing.
class SplitBackward {
 public:
  /// Runs the first half: `input`, a leaf that requires a gradient, has it afterwards. Other leaves
  /// are as before. With an `input` that needs none, or that `output` does not depend on, the first
  /// half is nothing. `gradient` is as for `backward`. Throws what `backward` throws.
  SplitBackward(const at::Tensor& output, const at::Tensor& gradient, const at::Tensor& input);
  ~SplitBackward();
  SplitBackward(SplitBackward&&) noexcept;
  SplitBackward& operator=(SplitBackward&&) noexcept;

  /// The second half, once. Uses the graph up.
  void finish();

 private:
  at::Tensor output_;  ///< Holds the graph. Undefined when nothing is left to do.
  at::Tensor gradient_;
  std::unique_ptr<detail::GraphWalk> walk_;  ///< Null: the second half is the whole backward.
};

}  // namespace lockstep
