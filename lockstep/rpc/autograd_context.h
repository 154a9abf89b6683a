#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace lockstep::rpc {

/// Records what crosses workers, so that `backward` goes the same way back. Made on a thread, which
/// makes its calls within it. Functions that those calls run, and their own calls, belong to it as
/// well. Of the design of torch.distributed.autograd, whose FAST mode this is: every call that was
/// recorded takes part in backward. Ends with the object, on all workers that took part.
///
/// Gradients lie in the context, not in `grad()`: several contexts do not disturb each other. One a
/// thread at a time; not copied or moved.
class AutogradContext {
 public:
  /// Throws UsageError without an agent and within another context on this thread.
  AutogradContext();
  ~AutogradContext();
  AutogradContext(const AutogradContext&) = delete;
  AutogradContext& operator=(const AutogradContext&) = delete;

  /// The same number on all workers.
  int64_t id() const { return id_; }

  /// Gradients of the sum of `roots`, each of one element, for all leaves that they depend on, on
  /// any worker. Blocks until all workers are done. Throws what failed on any of them.
  void backward(const std::vector<at::Tensor>& roots, bool retain_graph = false);

  /// This worker's leaf and gradient pairs.
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients() const;
  /// The gradient of a leaf of this worker; undefined when it has none.
  at::Tensor gradient(const at::Tensor& leaf) const;

 private:
  int64_t id_;
};

/// This worker's gradients in a context, by its number: for a function that another worker calls.
/// Throws UsageError for a context that this worker does not know.
std::vector<std::pair<at::Tensor, at::Tensor>> gradients_of(int64_t context_id);
/// Those of the leaves, in their order; undefined where there is none.
std::vector<at::Tensor> gradients_of(int64_t context_id, const std::vector<at::Tensor>& leaves);

}  // namespace lockstep::rpc
