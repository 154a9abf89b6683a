#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <optional>

namespace lockstep {

/// PyTorch's torch.autocast as a guard. While it lives, operations on this thread take the dtype
/// that suits each: matrix products and convolutions take `dtype`, sums and losses float32.
/// Parameters stay as they are. Run forward and the loss in it, and backward outside:
///
///     at::Tensor loss;
///     {
///       const lockstep::Autocast autocast(c10::kCPU, at::kBFloat16);
///       loss = cross_entropy(model->forward(x), y);
///     }
///     lockstep::backward(loss);
///
/// Guards nest: an inner one with `enabled` false computes in the tensors' own dtypes, and each
/// restores what was there before. Inside the outermost one a parameter is cast once and kept. The
/// outermost one drops these casts at its end, so parameters must not change within it.
/// Guards end in the reverse order of their starts, on the thread that made them. Threads that a
/// guard's owner starts are not under it.
class Autocast {
 public:
  struct Options {
    /// False turns autocast off inside, as around an operation that needs float32.
    bool enabled = true;
    /// Whether casts of parameters are kept. None: as outside. False where a graph is recorded for
    /// replay, or to save their memory.
    std::optional<bool> cache_enabled = {};
  };

  /// Throws UsageError for a dtype other than bfloat16 and float16, and for a device without
  /// autocast. With `enabled` false any dtype goes.
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
