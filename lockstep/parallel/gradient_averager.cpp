#include "lockstep/parallel/gradient_averager.h"

#include <torch/nn/module.h>

#include <string>

#include "lockstep/base/error.h"
#include "lockstep/parallel/module_state.h"

namespace lockstep {
namespace {

using detail::ModuleState;

DdpOptions ddp_options(const GradientAveragerOptions& options) {
  DdpOptions ddp;
  ddp.init_sync = options.init_sync;
  ddp.bucket_cap_mb = options.bucket_cap_mb;
  ddp.first_bucket_mb = options.first_bucket_mb;
  ddp.gradient_as_bucket_view = options.gradient_as_bucket_view;
  ddp.comm_hook = options.comm_hook;
  ddp.check_drift = options.check_drift;
  return ddp;
}

ModuleState state_of(const std::vector<at::Tensor>& parameters) {
  ModuleState state;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const std::string name = "parameter " + std::to_string(i);
    if (!parameters[i].defined() || !parameters[i].is_leaf()) {
      throw UsageError("GradientAverager: " + name + " is no leaf: backward gives it no gradient",
                       "give it what module.parameters() returns");
    }
    state.parameters.push_back({name, parameters[i]});
    if (parameters[i].requires_grad()) state.reduced.push_back({name, parameters[i], false});
  }
  return state;
}

}  // namespace

GradientAverager::GradientAverager(torch::nn::Module& module, const ProcessGroup& group,
                                   const GradientAveragerOptions& options)
    : core_(detail::make_averager_core(detail::whole_module_state(module), group,
                                       ddp_options(options), "GradientAverager", &module)),
      has_module_(true) {}

GradientAverager::GradientAverager(const std::vector<at::Tensor>& parameters,
                                   const ProcessGroup& group,
                                   const GradientAveragerOptions& options)
    : core_(detail::make_averager_core(state_of(parameters), group, ddp_options(options),
                                       "GradientAverager", nullptr)),
      has_module_(false) {}

void GradientAverager::sync_buffers() {
  if (!has_module_) {
    throw UsageError("GradientAverager: sync_buffers knows no buffers, as it was given parameters",
                     "make the averager of the module: GradientAverager(model, group)");
  }
  core_->share_buffers();
}

}  // namespace lockstep
