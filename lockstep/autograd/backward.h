#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace lockstep {

/// What `loss.backward(gradient)` does, with the same order and the same bits, at less cost. For a
/// small model on a CPU most of backward's time is not the mathematics. It is what LibTorch's
/// engine does around each node of the graph: it sets all of the thread's state anew, locks and
/// looks up. Here the calling thread walks the graph's own nodes and keeps its state.
///
/// `loss` has one element unless `gradient`, of its shape, is given. The gradients are added to
/// those of the leaves, and the graph is used up, as with retain_graph = false. Blocks until all is
/// done. Any thread may call. Throws what `loss.backward` throws.
///
/// What the walk does not know goes to LibTorch's engine:
/// - tensors that are not on the CPU, nested tensors and subclasses
/// - hooks on tensors or nodes other than those of DistributedDataParallel's own reducer
/// - anomaly and inference mode
/// - a call within another backward, as checkpointing makes
///
/// A node of the user's own that asks the engine for a callback at the end of backward needs
/// `loss.backward()`.
void backward(const at::Tensor& loss, const at::Tensor& gradient = {});

/// Whether `backward(loss)` walks the graph itself. For tests, and to see why a step is slow.
bool walks_backward(const at::Tensor& loss);

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
