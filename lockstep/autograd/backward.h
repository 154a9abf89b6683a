#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep {

/// What `loss.backward(gradient)` does, with the same order and the same bits, at less cost. For a
/// small model on a CPU most of backward's time is not the mathematics. It is what LibTorch's
/// engine does around each node of the graph. The engine sets all of the thread's state anew, twice
/// per node, locks and looks up. Here the calling thread walks the graph's own nodes and keeps its
/// state.
///
/// `loss` has one element unless `gradient`, of its shape, is given. The gradients are added to
/// those of the leaves. The graph is used up, as with retain_graph = false. Blocks until all is
/// done. Any thread may call. Throws what `loss.backward` throws.
///
/// What the walk does not know goes to LibTorch's engine:
/// - tensors that are not on the CPU,
/// - hooks on tensors or nodes, except those of DistributedDataParallel's own reducer,
/// - nested tensors and subclasses,
/// - anomaly mode and inference mode.
///
/// A node of the user's own that asks the engine for a callback at the end of backward needs
/// `loss.backward()`.
void backward(const at::Tensor& loss, const at::Tensor& gradient = {});

/// Whether `backward` walks this loss's graph itself. For tests, and to see why a step is slow.
bool walks_backward(const at::Tensor& loss);

}  // namespace lockstep
