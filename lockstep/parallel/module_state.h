#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/gradient_reducer.h"

namespace lockstep::detail {

using NamedTensor = ReducedParameter;

/// What DistributedDataParallel works on, each tensor once, in Python's order.
struct ModuleState {
  std::vector<NamedTensor> parameters;  ///< All, also frozen ones.
  std::vector<NamedTensor> buffers;
  std::vector<ReducedParameter> reduced;  ///< The parameters that get a gradient.
};

/// Frees the memory of a parameter that this rank does not keep. It has its shape, and NaN as its
/// values. Whatever wraps the module next gives it memory again, still with NaN, to load a state.
void free_values(at::Tensor parameter);
/// Gives memory, and NaN in it, to a parameter whose values were freed, or were those of a
/// FullyShardedDataParallel that is gone. Leaves any other as it is.
void restore_memory(const at::Tensor& parameter);

/// Leaves out what is named in `ignored`. Throws UsageError for an ignored name that the module
/// does not have and for a module without a parameter that needs a gradient. `what` names the
/// caller in it, here and below.
ModuleState find_module_state(torch::nn::Module& module, const std::vector<std::string>& ignored,
                              const std::string& what);
/// The same, of a module that may be frozen, and with all of its tensors.
ModuleState whole_module_state(torch::nn::Module& module);

/// Throws MismatchError on every rank when a parameter or buffer differs from rank 0's in name,
/// shape, dtype, strides or need of a gradient. The error names the first. A collective.
void check_same_state(const ModuleState& state, const ProcessGroup& group, const std::string& what);

/// The same, and all ranks get rank 0's values, except of tensors on device meta, which have none.
void start_alike(const ModuleState& state, const ProcessGroup& group, const std::string& what);

/// Throws UsageError for a parameter that has another dtype or shape now than when it was wrapped.
/// `place` names the caller and its rank.
void expect_kind(const std::string& place, const std::string& name, const at::Tensor& now,
                 at::ScalarType dtype, at::IntArrayRef sizes);

/// Throws MismatchError unless all ranks have put values into the same parameters, given by number.
/// A collective: a rank that has put in none makes another call, which the comparison of calls
/// finds.
void check_same_on_all(const std::vector<size_t>& changed, const ProcessGroup& group,
                       const std::string& what);

/// The values of rank `src` go to all ranks, in as few operations as possible. A collective.
void broadcast_tensors(const std::vector<at::Tensor>& tensors, const ProcessGroup& group,
                       int src = 0);

/// The same of a module's buffers.
void share_buffers(const torch::nn::Module& module, const ProcessGroup& group);

}  // namespace lockstep::detail
