#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/comm/backends/tensor_work.h"

namespace lockstep::hierarchical {

/// A plain copy of a tensor (is_plain) for a backend that takes no other, made outside autograd.
class Staging {
 public:
  explicit Staging(Operation operation) : operation_(operation) {}

  /// A tensor of the same values: itself where it can be.
  static at::Tensor given(const at::Tensor& tensor);
  /// The same for a result, which the caller's tensor gets at the end. Throws UsageError; see
  /// expect_own_elements.
  at::Tensor taken(const at::Tensor& tensor);
  /// A work that ends as `inner` does and has then written the result; `inner` itself where nothing
  /// was copied.
  c10::intrusive_ptr<c10d::Work> work(c10::intrusive_ptr<c10d::Work> inner);

 private:
  const Operation operation_;
  at::Tensor result_;
  at::Tensor copy_;  ///< At the end the result gets its values.
};

}  // namespace lockstep::hierarchical
