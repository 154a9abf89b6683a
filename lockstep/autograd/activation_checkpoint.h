#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace lockstep {

struct CheckpointOptions {
  /// The second run draws the same random numbers as the first, so that dropout uses the same
  /// masks. It costs a copy of the generators' states (5 KB for the CPU). Set it to false if
  /// nothing is drawn.
  bool preserve_rng_state = true;
};

/// PyTorch's torch.utils.checkpoint, activation checkpointing (Chen et al. 2016): returns the
/// outputs of `function` without keeping its intermediate activations. Backward runs `function`
/// again from the saved inputs, and then computes its gradients. This saves memory and takes about
/// a third more time.
///
/// Outputs and gradients have the bits of a direct call of `function`. The second run has the
/// autocast state of the first. `function` may use parameters and may contain checkpoints itself.
/// It is kept alive until its backward. It must do the same both times: state that it changes
/// (batch norm's statistics) is changed twice, as in Python. The second run is on the thread that
/// runs backward. Parameters get gradients even if no input requires one.
///
/// Double backward and `torch::autograd::grad` with given inputs are not supported: they throw
/// UsageError in backward. So does a second run whose outputs have other shapes.
at::Tensor checkpoint(std::function<at::Tensor(const at::Tensor&)> function,
                      const at::Tensor& input, const CheckpointOptions& options = {});

/// The same for several inputs and outputs. Undefined tensors are passed through.
std::vector<at::Tensor> checkpoint(
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> function,
    const std::vector<at::Tensor>& inputs, const CheckpointOptions& options = {});

/// torch.utils.checkpoint.checkpoint_sequential: calls the functions one after the other, in
/// `segments` parts of nearly equal length. All parts except the last are checkpointed. Throws
/// UsageError if `segments` is not between 1 and the number of functions.
at::Tensor checkpoint_sequential(
    const std::vector<std::function<at::Tensor(const at::Tensor&)>>& functions, int64_t segments,
    const at::Tensor& input, const CheckpointOptions& options = {});

}  // namespace lockstep
