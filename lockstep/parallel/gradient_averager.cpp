#include "lockstep/parallel/gradient_averager.h"

#include <torch/nn/module.h>

#include <mutex>
#include <string>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/parallel/gradient_listeners.h"
#include "lockstep/parallel/gradient_reducer.h"
#include "lockstep/parallel/module_state.h"

namespace lockstep {
namespace {

using detail::ModuleState;
using detail::NamedTensor;

DdpOptions ddp_options(const GradientAveragerOptions& options) {
  DdpOptions ddp;
  ddp.bucket_cap_mb = options.bucket_cap_mb;
  ddp.first_bucket_mb = options.first_bucket_mb;
  if (!options.gradient_as_bucket_view) ddp.gradient_as_bucket_view = false;
  ddp.reducer = options.reducer;
  ddp.comm_hook = options.comm_hook;
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

struct GradientAverager::Impl {
  ProcessGroup group;
  std::vector<at::Tensor> buffers;
  bool has_module = false;
  bool synchronizing = true;
  int64_t iterations = 0;
  int64_t elements = 0;
  std::vector<std::string> names;  ///< Of the parameters that get a gradient.
  std::vector<bool> ready;         ///< Of them: has it come since the last average?
  size_t awaited = 0;              ///< How many are still to come; 0: the last average is done.
  std::mutex mutex;                ///< Held while a gradient is counted.
  detail::GradientListeners listeners;
  /// Null with one rank. Its own listeners come after ours.
  std::unique_ptr<detail::GradientReducer> reducer;

  Impl(const ModuleState& state, ProcessGroup of, const GradientAveragerOptions& options)
      : group(std::move(of)) {
    if (!group) throw UsageError("GradientAverager: the process group is null");
    if (state.reduced.empty()) {
      throw UsageError("GradientAverager: no parameter needs a gradient",
                       "give it the parameters that are trained");
    }
    for (const auto& parameter : state.reduced) elements += parameter.tensor.numel();
    for (const NamedTensor& item : state.buffers) buffers.push_back(item.tensor);
    if (group.size() == 1 && options.comm_hook == CommHook::none) return;
    if (options.init_sync) share(state);
    for (size_t i = 0; i < state.reduced.size(); ++i) {
      names.push_back(state.reduced[i].name);
      listeners.add(state.reduced[i].tensor, [this, i] { on_gradient(i); });
    }
    ready.resize(names.size());
    reducer = make_gradient_reducer(state.reduced, group, ddp_options(options));
  }

  void share(const ModuleState& state) const {
    check_same_state(state, group, "GradientAverager");
    std::vector<at::Tensor> tensors = buffers;
    for (const NamedTensor& item : state.parameters) tensors.push_back(item.tensor.detach());
    detail::broadcast_tensors(tensors, group);
  }

  /// Before the reducer's own listener. What DistributedDataParallel does around a forward, the
  /// first gradient of an iteration does here.
  void on_gradient(size_t index) {
    // Distributed autograd runs a backward on several threads where gradients come from others.
    const std::lock_guard lock(mutex);
    if (!synchronizing) return;
    if (awaited == 0) begin();
    if (ready[index]) {
      // The backward before may have thrown. Then the one after this is to be a fresh one.
      awaited = 0;
      reducer->forget_backward();
      throw_missing(index);
    }
    ready[index] = true;
    --awaited;
  }

  void begin() {
    reducer->begin_within_backward();
    ready.assign(names.size(), false);
    awaited = names.size();
    group.note_steps(++iterations);
  }

  [[noreturn]] void throw_missing(size_t index) const {
    std::vector<std::string> missing;
    for (size_t i = 0; i < ready.size(); ++i) {
      if (!ready[i]) missing.push_back(names[i]);
    }
    throw UsageError("GradientAverager, rank " + std::to_string(group.rank()) +
                         ": backward gives " + names[index] +
                         " a second gradient, but gave none yet to: " + join(missing, ", "),
                     "average only parameters that every step uses, or take "
                     "DistributedDataParallel with find_unused_parameters. Where the backward "
                     "before threw on all ranks alike, zero the gradients and go on: this comes "
                     "once, except with Reducer::c10d. Else end the run");
  }
};

GradientAverager::GradientAverager(torch::nn::Module& module, const ProcessGroup& group,
                                   const GradientAveragerOptions& options)
    : impl_(std::make_unique<Impl>(detail::whole_module_state(module), group, options)) {
  impl_->has_module = true;
}

GradientAverager::GradientAverager(const std::vector<at::Tensor>& parameters,
                                   const ProcessGroup& group,
                                   const GradientAveragerOptions& options)
    : impl_(std::make_unique<Impl>(state_of(parameters), group, options)) {}

GradientAverager::~GradientAverager() = default;
GradientAverager::GradientAverager(GradientAverager&&) noexcept = default;
GradientAverager& GradientAverager::operator=(GradientAverager&&) noexcept = default;

void GradientAverager::sync_buffers() {
  if (!impl_->has_module) {
    throw UsageError("GradientAverager: sync_buffers knows no buffers, as it was given parameters",
                     "make the averager of the module: GradientAverager(model, group)");
  }
  if (impl_->group.size() > 1) detail::broadcast_tensors(impl_->buffers, impl_->group);
}

NoSync GradientAverager::no_sync() {
  return NoSync(impl_->synchronizing);
}

const ProcessGroup& GradientAverager::group() const {
  return impl_->group;
}

DdpStatistics GradientAverager::statistics() const {
  DdpStatistics statistics;
  statistics.iterations = impl_->iterations;
  statistics.parameters = impl_->elements;
  if (impl_->reducer) impl_->reducer->fill(statistics);
  return statistics;
}

}  // namespace lockstep
