#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace lockstep::rpc {

/// Records calls between workers, so that `backward` can go back through them. While it lives, the
/// calls of the thread that made it are recorded, and so are the calls of the functions that they
/// run. It is torch.distributed.autograd's context in FAST mode: every recorded call takes part in
/// backward. Destroying the object ends the context on all workers that took part.
///
/// Gradients are stored in the context, not in `grad()`, so contexts do not affect each other. A
/// thread may have one at a time.
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
