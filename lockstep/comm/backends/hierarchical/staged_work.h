#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/tensor_work.h"

namespace lockstep::hierarchical {

/// Contiguous copies for a backend that takes no others, made outside autograd.
class Staging {
 public:
  using Tensors = backends::Tensors;
  explicit Staging(Operation operation) : operation_(operation) {}

  /// Tensors of the same values: themselves where they can be.
  static Tensors given(const Tensors& tensors);
  /// The same for results, which the caller's tensors get at the end. Throws UsageError; see
  /// expect_own_elements.
  Tensors taken(const Tensors& tensors);
  /// A work that ends as `inner` does and has then written the results; `inner` itself where
  /// nothing was copied.
  c10::intrusive_ptr<c10d::Work> work(c10::intrusive_ptr<c10d::Work> inner);

 private:
  const Operation operation_;
  Tensors results_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  ///< At the end: to, from.
};

}  // namespace lockstep::hierarchical
