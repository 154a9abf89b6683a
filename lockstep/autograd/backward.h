#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace lockstep {

/// Does what `loss.backward(gradient)` does, in the same order and with the same bits, in less
/// time. For a small model on a CPU most of backward's time is not arithmetic. It is the work of
/// LibTorch's engine around each node of the graph: it resets the thread-local state, takes locks
/// and does look-ups. Here the calling thread runs the graph's nodes itself and keeps its state.
///
/// `loss` must have one element, unless `gradient`, of the same shape, is given. Gradients
/// accumulate in the leaves, and the graph is freed, as with retain_graph = false. Blocks until all
/// is done. Any thread may call it. Throws what `loss.backward` throws.
///
/// These cases are left to LibTorch's engine:
/// - tensors that are not on the CPU, nested tensors and subclasses
/// - hooks on tensors or nodes other than those of DistributedDataParallel's own reducer
/// - anomaly and inference mode
/// - a call within another backward, as in activation checkpointing
///
/// A custom node that queues a callback in the engine for the end of backward needs
/// `loss.backward()`.
void backward(const at::Tensor& loss, const at::Tensor& gradient = {});

/// Whether `backward(loss)` runs the graph itself. For tests, and to see why a step is slow.
bool walks_backward(const at::Tensor& loss);

namespace detail {
class GraphWalk;
}

/// A backward in two halves, as zero-bubble pipelines need it (Qi et al. 2023). The first computes
/// the gradient of the input, for which another stage waits. The second computes the gradients of
/// the weights, later. Together they give the bits of `backward(output, gradient)`. A node that
/// belongs to both halves, such as a linear layer's, computes in each only what that half needs.
///
/// If `backward` would leave the graph to LibTorch's engine (CUDA, hooks), or if the graph holds an
/// activation checkpoint, the first half is the whole backward and the second does nothing.
class SplitBackward {
 public:
  /// Runs the first half: afterwards `input`, a leaf that requires a gradient, has its gradient.
  /// Other leaves are unchanged. If `input` requires no gradient, or `output` does not depend on
  /// it, the first half does nothing. `gradient` is as for `backward`. Throws what `backward`
  /// throws.
  SplitBackward(const at::Tensor& output, const at::Tensor& gradient, const at::Tensor& input);
  ~SplitBackward();
  SplitBackward(SplitBackward&&) noexcept;
  SplitBackward& operator=(SplitBackward&&) noexcept;

  /// Runs the second half, once, and frees the graph.
  void finish();

 private:
  at::Tensor output_;  ///< Holds the graph. Undefined when nothing is left to do.
  at::Tensor gradient_;
  std::unique_ptr<detail::GraphWalk> walk_;  ///< Null: the second half is the whole backward.
};

}  // namespace lockstep
