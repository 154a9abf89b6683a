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

/// torch::optim::LBFGS behind our interface. It looks at all parameters as one vector, so its state
/// is one of the whole: each entry has the index 0, as Python keeps it with the first parameter.
/// A line search evaluates the loss up to 25 times, whatever max_iter. Python's, since
/// PyTorch 2.13, ends where the step has made 1.25 max_iter evaluations.
std::unique_ptr<Optimizer> make_lbfgs(std::vector<at::Tensor> parameters,
                                      const OptimizerOptions& options);

}  // namespace lockstep
