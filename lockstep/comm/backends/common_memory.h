#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lockstep::backends {

/// A backend whose ranks can have memory in common.
class CommonMemory {
 public:
  virtual ~CommonMemory() = default;
  /// See common_empty. A collective.
  virtual at::Tensor allocate_common(int64_t numel, at::ScalarType dtype) = 0;
};

}  // namespace lockstep::backends
