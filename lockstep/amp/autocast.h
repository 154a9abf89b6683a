#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <optional>

namespace lockstep {

/// PyTorch's torch.autocast as a guard. While it lives, each operation on this thread runs in the
/// dtype that suits it: matrix products and convolutions in `dtype`, sums and losses in float32.
/// Parameters keep their dtype. Run forward and the loss in it, and backward outside:
///
///     at::Tensor loss;
///     {
///       const lockstep::Autocast autocast(c10::kCPU, at::kBFloat16);
///       loss = cross_entropy(model->forward(x), y);
///     }
///     lockstep::backward(loss);
///
/// Guards nest. An inner one with `enabled` false computes in the tensors' own dtypes. Each guard
/// restores the previous state. Within the outermost guard the cast of a parameter is cached. The
/// outermost guard clears this cache at its end, so parameters must not change within it. Destroy
/// guards in reverse order, on the thread that made them. A guard does not apply to threads that
/// are started within it.
class Autocast {
 public:
  struct Options {
    /// False turns autocast off, for example around an operation that needs float32.
    bool enabled = true;
    /// Whether casts of parameters are cached. None: as outside. Use false when recording a graph
    /// for replay, or to save memory.
    std::optional<bool> cache_enabled = {};
  };

  /// Throws UsageError for a dtype other than bfloat16 and float16, and for a device without
  /// autocast. With `enabled` false any dtype is accepted.
  Autocast(c10::DeviceType device, at::ScalarType dtype) : Autocast(device, dtype, Options()) {}
  Autocast(c10::DeviceType device, at::ScalarType dtype, const Options& options);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  c10::DeviceType device_;
  bool outer_enabled_;
  at::ScalarType outer_dtype_;
  bool outer_cache_enabled_;
};

}  // namespace lockstep
