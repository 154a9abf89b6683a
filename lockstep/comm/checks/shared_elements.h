#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/checks/observed_call.h"

namespace lockstep {

/// `input`, or a copy of it where it shares memory with one of `outputs`: each backend reads and
/// writes in an order of its own. Where all of it lies at `in_place`, backends take it as it is.
at::Tensor apart_from(c10::ArrayRef<at::Tensor> outputs, const at::Tensor& input,
                      const void* in_place = nullptr);
std::vector<at::Tensor> apart_from(c10::ArrayRef<at::Tensor> outputs,
                                   c10::ArrayRef<at::Tensor> inputs,
                                   const void* in_place = nullptr);

/// Throws UsageError where two of the tensors, which become results, share memory. Of strided ones
/// that only lie between each other's elements it knows nothing, and lets them pass.
void expect_apart(Operation operation, c10::ArrayRef<at::Tensor> results);

}  // namespace lockstep
