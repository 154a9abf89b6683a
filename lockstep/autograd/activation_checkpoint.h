#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace lockstep {

struct CheckpointOptions {
  /// Random numbers in the second run are those of the first, so that dropout drops the same. It
  /// costs a copy of the generators' states (5 KB for the CPU's). False where nothing is drawn.
  bool preserve_rng_state = true;
};

/// PyTorch's torch.utils.checkpoint, activation checkpointing (Chen et al. 2016): the outputs of
/// `function` without keeping what backward needs of its inside. Backward runs `function` again
/// from the kept inputs, and then its gradients. Memory is given for about a third more time.
///
/// Outputs and gradients have the bits of `function` called directly. The second run has autocast's
/// state of the first. `function` may use parameters, may hold checkpoints itself, and is kept
/// alive until its backward. It must do the same both times: what it changes (a batch norm's
/// statistics) is changed twice, as in Python. It runs on the thread that runs backward. Parameters
/// get their gradients when no input needs one, too.
///
/// Not for gradients of gradients, nor within `torch::autograd::grad` with named inputs: these
/// throw UsageError in backward. So does a second run whose outputs have other shapes.
at::Tensor checkpoint(std::function<at::Tensor(const at::Tensor&)> function,
                      const at::Tensor& input, const CheckpointOptions& options = {});

/// The same for several inputs and outputs. Undefined tensors are passed on as they are.
std::vector<at::Tensor> checkpoint(
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> function,
    const std::vector<at::Tensor>& inputs, const CheckpointOptions& options = {});

/// torch.utils.checkpoint.checkpoint_sequential: the functions one after the other, in `segments`
/// parts as equal as can be. All but the last part are checkpointed. Throws UsageError for segments
/// that are not between 1 and the number of functions.
at::Tensor checkpoint_sequential(
    const std::vector<std::function<at::Tensor(const at::Tensor&)>>& functions, int64_t segments,
    const at::Tensor& input, const CheckpointOptions& options = {});

}  // namespace lockstep
