#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/optim/optim.h"

namespace lockstep {

/// One of torch::optim's optimizers (adam, adamw, rmsprop, adagrad) behind our interface. Null for
/// another name. Their formulas are those of Python's, in another order of operations. So results
/// differ from Python's in the last bits.
std::unique_ptr<Optimizer> make_torch_optimizer(const std::string& name,
                                                std::vector<at::Tensor> parameters,
                                                const OptimizerOptions& options);

}  // namespace lockstep
