#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/optim/optim.h"

namespace lockstep {

/// torch::optim's rmsprop or adagrad behind our interface. Their formulas are those of Python's, in
/// another order of operations. So results differ from Python's in the last bits.
std::unique_ptr<Optimizer> make_torch_optimizer(const std::string& name,
                                                std::vector<at::Tensor> parameters,
                                                const OptimizerOptions& options);

/// adam or adamw through LibTorch's fused kernels: one pass over parameter, gradient and state in
/// place of about twelve. The bits are those of Python's torch.optim.Adam(fused=True). One step
/// differs from Python's default, because the operations round in another order. The difference is
/// a few units in the last place of the larger of parameter and update. The bits do not depend on
/// the number of threads. State has the names and shapes of torch::optim's.
///
/// `step` throws UsageError for a gradient of a parameter that is complex or not dense (contiguous,
/// or channels-last and the like).
std::unique_ptr<Optimizer> make_fused_adam(const std::string& name,
                                           std::vector<at::Tensor> parameters,
                                           const OptimizerOptions& options);

/// torch::optim::LBFGS behind our interface. It looks at all parameters as one vector, so its state
/// is one of the whole: each entry has the index 0, as Python keeps it with the first parameter.
/// A line search evaluates the loss up to 25 times, whatever max_iter. Python's, since
/// PyTorch 2.13, ends where the step has made 1.25 max_iter evaluations.
std::unique_ptr<Optimizer> make_lbfgs(std::vector<at::Tensor> parameters,
                                      const OptimizerOptions& options);

}  // namespace lockstep
