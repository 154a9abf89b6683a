#include "lockstep/parallel/ddp.h"

#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/parallel/gradient_reducer.h"
#include "lockstep/parallel/gradient_tracker.h"
#include "lockstep/parallel/module_state.h"

namespace lockstep::detail {
namespace {

bool changes_bits(const DdpOptions& options) {
  return options.custom_hook || options.async_custom_hook ||
         options.comm_hook == CommHook::fp16_compress ||
         options.comm_hook == CommHook::bf16_compress;
}

void check_values(const ModuleState& state, const std::string& what) {
  const auto check = [&](const char* kind, const NamedTensor& item) {
    if (!item.tensor.is_meta()) return;
    throw UsageError(what + ": " + kind + " '" + item.name +
                         "' is on device meta: it has a shape, but no values",
                     "make the module on a real device, or use a strategy that shards it");
  };
  for (const NamedTensor& item : state.parameters) check("parameter", item);
  for (const NamedTensor& item : state.buffers) check("buffer", item);
}

/// A backward with retain_graph does not use its forward up.
bool keeps_graph() {
  return torch::autograd::get_current_graph_task_id() != -1 &&
         torch::autograd::get_current_graph_task_keep_graph();
}

/// What a reducer builds upon.
struct Kind {
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  bool needs_gradient;
  /// Weak: it neither keeps values alive, nor can another one have its address.
  c10::weak_intrusive_ptr<c10::StorageImpl> memory;

  explicit Kind(const at::Tensor& tensor)
      : dtype(tensor.scalar_type()),
        sizes(tensor.sizes().vec()),
        needs_gradient(tensor.requires_grad()),
        memory(tensor.storage().getWeakStorageImpl()) {}
};

}  // namespace

struct DdpCore::Impl : Joinable, GradientReceiver {
  ProcessGroup group;
  std::vector<at::Tensor> buffers;  ///< Those that are broadcast before a forward.
  int64_t elements = 0;             ///< That get a gradient.
  int64_t iterations = 0;
  int64_t steps = 0;    ///< That average gradients.
  std::string what;     ///< For messages.
  bool wrapped = true;  ///< Forwards tell of themselves.
  bool fixed = false;   ///< The reducer is the caller's own.
  DdpOptions options;
  bool forwarded = false;      ///< One has.
  int64_t awaited = 0;         ///< Forwards whose backward is to average, and has not.
  bool graph_is_kept = false;  ///< By the backward of this round.
  bool synchronizing = true;
  bool sync_buffers = true;
  bool adding_up = false;
  bool all_frozen = false;      ///< At the last forward, as a GAN's discriminator is at times.
  bool has_own_hook = false;    ///< Of the user's, which a Join cannot run for other ranks.
  bool divides_by_size = true;  ///< Also while some ranks have no inputs left.
  const torch::nn::Module* module = nullptr;  ///< Where forwards tell of themselves. It lives on.
  size_t all_parameters = 0;                  ///< Of the module, when it was wrapped.
  int64_t forwards = 0;
  ModuleState state;                     ///< Its `reduced` are the reducer's.
  std::vector<Kind> kinds;               ///< Of the state's parameters, when the reducer was made.
  std::vector<ReducedParameter> frozen;  ///< Of the parameters, when this was made.
  std::optional<ActiveRanks> active;     ///< In the present iteration of a Join.
  /// Its hooks come before those of the reducer.
  GradientTracker tracker{*this};
  /// Null when there is nothing to do around forward: one rank and no hook that changes bits.
  std::unique_ptr<GradientReducer> reducer;

  Impl(ProcessGroup of, std::string name) : group(std::move(of)), what(std::move(name)) {
    if (group) return;
    throw UsageError(what + ": the process group is null",
                     "ranks that are not in a group must not wrap a module with it");
  }

  void start(ModuleState of_module, DdpOptions with, const ReducerFactory& make_reducer) {
    check_values(of_module, what);
    state = std::move(of_module);
    options = std::move(with);
    for (const ReducedParameter& parameter : state.reduced) elements += parameter.tensor.numel();
    if (group.size() > 1 || changes_bits(options)) prepare(make_reducer);
  }

  void prepare(const ReducerFactory& make_reducer) {
    if (options.broadcast_buffers) {
      for (const NamedTensor& item : state.buffers) buffers.push_back(item.tensor);
    }
    if (options.init_sync) {
      check_same_state(state, group, what);
      std::vector<at::Tensor> tensors = values();
      tensors.insert(tensors.end(), buffers.begin(), buffers.end());
      broadcast_tensors(tensors, group);
    }
    has_own_hook = options.custom_hook || options.async_custom_hook;
    fixed = make_reducer != nullptr;
    set_up_reducer(make_reducer);
    if (!wrapped) watch_all();
  }

  /// The parameters' memory as it is now.
  std::vector<at::Tensor> values() const {
    std::vector<at::Tensor> values;
    for (const NamedTensor& item : state.parameters) values.push_back(item.tensor.detach());
    return values;
  }

  void set_up_reducer(const ReducerFactory& make_reducer) {
    kinds.clear();
    for (const NamedTensor& item : state.parameters) kinds.emplace_back(item.tensor);
    std::vector<at::Tensor> tracked;
    for (const ReducedParameter& parameter : state.reduced) tracked.push_back(parameter.tensor);
    tracker.track(std::move(tracked));
    reducer = make_reducer ? make_reducer(state.reduced)
                           : make_gradient_reducer(state.reduced, group, options);
    tracker.set_rules(reducer->rules());
  }

  void watch_all() {
    std::vector<at::Tensor> others;
    for (const NamedTensor& item : state.parameters) {
      if (item.tensor.requires_grad()) continue;
      frozen.push_back(item);
      others.push_back(item.tensor);
    }
    tracker.watch(others);
  }

  /// At the first forward and every 100th, as it takes a walk through the module.
  void expect_all_parameters() {
    if (!module || forwards++ % 100 != 0) return;
    const size_t now = module->parameters().size();
    if (now == all_parameters) return;
    throw UsageError(place() + ": the module has " +
                         counted(static_cast<int64_t>(now), "parameter") + ", and had " +
                         std::to_string(all_parameters) +
                         " when it was wrapped: new ones would not be averaged",
                     "wrap the module after its last layer was added");
  }

  /// Before a forward. Values that were put into the module (torch::load, set_data) may come with
  /// other nodes that add gradients, and layers may have been frozen or unfrozen.
  void follow_module() {
    expect_all_parameters();
    const auto is_frozen = [](const NamedTensor& item) { return !item.tensor.requires_grad(); };
    all_frozen = std::all_of(state.parameters.begin(), state.parameters.end(), is_frozen);
    if (all_frozen) return;
    const bool loses_hooks = tracker.refresh() && reducer->has_hooks();
    const NamedTensor* const changed = find_changed();
    if (!changed && !loses_hooks) return;
    if (fixed || has_own_hook) refuse(changed ? *changed : state.reduced.front());
    state.reduced.clear();
    elements = 0;
    for (const NamedTensor& item : state.parameters) {
      if (!item.tensor.requires_grad()) continue;
      state.reduced.push_back(item);
      elements += item.tensor.numel();
    }
    // A rank that sees no change makes another call, which the comparison of calls finds.
    check_same_state(state, group, what);
    reducer.reset();
    set_up_reducer({});
  }

  /// A parameter that was frozen or unfrozen. Throws for one of another dtype or shape, and, on all
  /// ranks, where values were put in on some only.
  const NamedTensor* find_changed() {
    const NamedTensor* changed = nullptr;
    std::vector<size_t> moved;
    for (size_t i = 0; i < kinds.size(); ++i) {
      const NamedTensor& item = state.parameters[i];
      if (kinds[i].needs_gradient)
        expect_kind(place(), item.name, item.tensor, kinds[i].dtype, kinds[i].sizes);
      if (item.tensor.requires_grad() != kinds[i].needs_gradient) changed = &item;
      if (kinds[i].memory._unsafe_get_target() == item.tensor.storage().unsafeGetStorageImpl())
        continue;
      kinds[i].memory = item.tensor.storage().getWeakStorageImpl();
      moved.push_back(i);
    }
    // In a Join some ranks make no forward.
    if (!moved.empty() && !joins()) check_same_on_all(moved, group, what);
    return changed;
  }

  [[noreturn]] void refuse(const NamedTensor& item) const {
    throw UsageError(place() + ": parameter " + item.name +
                         " was frozen, unfrozen or given other memory after this was made",
                     "make this anew after such a change");
  }

  void on_other(size_t index) override { refuse(frozen[index]); }

  void on_new_node(size_t index) override {
    find_changed();
    if (reducer->has_hooks()) refuse(state.reduced[index]);
  }

  void on_backward(size_t index) override {
    if (!wrapped || forwarded) return;
    throw UsageError(place() + ": backward gives " + state.reduced[index].name +
                         " a gradient, but forward of the wrapper was never called: ranks would "
                         "drift apart",
                     "call ddp.forward(...) in place of the module's own forward, or take a "
                     "GradientAverager, which needs no wrapper");
  }

  bool begin_round() override {
    if (!synchronizing || (wrapped && awaited == 0)) return false;
    const NamedTensor* const changed = wrapped ? nullptr : find_changed();
    if (changed) refuse(*changed);
    reducer->begin();
    graph_is_kept = false;
    if (!wrapped) group.note_steps(++iterations);
    return true;
  }

  void take(size_t index) override {
    graph_is_kept = graph_is_kept || keeps_graph();
    reducer->take(index);
  }

  void end_round() override {
    reducer->end_backward();
    if (!graph_is_kept) awaited = std::max<int64_t>(0, awaited - reducer->used_forwards());
  }

  void refuse_second(size_t index, bool same_backward,
                     const std::vector<size_t>& missing) override {
    // The backward before may have thrown. Then the one after this is to be a fresh one.
    awaited = 0;
    const std::string& name = state.reduced[index].name;
    if (wrapped || same_backward)
      throw UsageError(
          place() + ": backward gave " + name + " its gradient twice",
          fixed ? "run the module once in each batch, and its backward once"
                : "a module that is run again in backward (checkpointing) or outside of this "
                  "forward needs DistributedDataParallel with DdpOptions::static_graph");
    throw UsageError(
        place() + ": backward gives " + name +
            " a second gradient, but gave none yet to: " + join(names_of(missing), ", "),
        "average only parameters that every step uses, or take "
        "DistributedDataParallel with find_unused_parameters. Where the backward "
        "before threw on all ranks alike, zero the gradients and go on: this comes "
        "once, except with Reducer::c10d. Else end the run");
  }

  std::vector<std::string> names_of(const std::vector<size_t>& indices) const {
    std::vector<std::string> names;
    for (const size_t index : indices) names.push_back(state.reduced[index].name);
    return names;
  }

  /// Throws where the last backward left parameters without a gradient.
  void check_complete() {
    const std::vector<size_t> missing = tracker.missing();
    if (missing.empty()) return;
    tracker.forget();
    awaited = 0;
    throw UsageError(
        place() + ": the last backward gave no gradient to these parameters: " +
            join(names_of(missing), ", "),
        fixed
            ? "make the loss depend on them in every batch, or freeze them"
            : "set DdpOptions::find_unused_parameters (or static_graph, when they are the same in "
              "every step), or make the loss depend on every output of forward");
  }

  std::string place() const { return what + ", rank " + std::to_string(group.rank()); }

  const ProcessGroup& join_process_group() const override { return group; }
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override;

  class Hook;

  /// A number for the others, where the group communicates.
  at::Tensor number(int64_t value) const {
    return at::full(
        {1}, value,
        state.parameters.front().tensor.options().dtype(at::kLong).requires_grad(false));
  }

  /// The largest rank for which `candidate` holds: all ranks agree on it.
  int common_rank(bool candidate) const {
    at::Tensor rank = number(candidate ? group.rank() : -1);
    group.all_reduce(rank, ReduceOp::max);
    return static_cast<int>(rank.item<int64_t>());
  }

  /// Before a forward. `joined`: this rank has no inputs left. Then its buffers do not count.
  void broadcast_buffers(bool joined) {
    if (!sync_buffers || buffers.empty()) return;
    std::vector<at::Tensor> values;
    // Not their versions: a graph of an earlier forward may hold them.
    for (const at::Tensor& buffer : buffers) values.push_back(buffer.variable_data());
    broadcast_tensors(values, group, joins() ? common_rank(!joined) : 0);
  }

  /// Whether ranks that have inputs average gradients in this iteration.
  bool agree_to_reduce(bool mine) const {
    at::Tensor wishes = number(mine ? 1 : 0);
    group.all_reduce(wishes, ReduceOp::max);
    return wishes.item<int64_t>() > 0;
  }
};

/// What DistributedDataParallel does on a rank without inputs.
class DdpCore::Impl::Hook : public JoinHook {
 public:
  explicit Hook(Impl& ddp) : ddp_(ddp) {}

  void main_hook() override {
    if (!ddp_.reducer) return;
    ddp_.reducer->before_forward(true);
    ddp_.broadcast_buffers(true);
    ddp_.sync_buffers = ddp_.agree_to_reduce(false);
    if (ddp_.sync_buffers) ddp_.reducer->reduce_zeros();
  }

  void post_hook(bool is_last_joiner) override {
    if (!ddp_.reducer) return;
    const int src = ddp_.common_rank(is_last_joiner);
    std::vector<at::Tensor> tensors = ddp_.values();
    tensors.insert(tensors.end(), ddp_.buffers.begin(), ddp_.buffers.end());
    broadcast_tensors(tensors, ddp_.group, src);
    ddp_.reducer->set_divisor(ddp_.group.size());
    ddp_.sync_buffers = true;
  }

 private:
  Impl& ddp_;
};

std::unique_ptr<JoinHook> DdpCore::Impl::join_hook(const JoinOptions& options) {
  if (has_own_hook)
    throw UsageError("Join: a DistributedDataParallel with a hook of the user's own",
                     "join one without a hook, or with a CommHook");
  divides_by_size = options.divide_by_initial_world_size;
  return std::make_unique<Hook>(*this);
}

DdpCore::DdpCore(torch::nn::Module& module, ProcessGroup group, const DdpOptions& options,
                 const ReducerFactory& make_reducer, const std::string& what)
    : impl_(std::make_unique<Impl>(std::move(group), what)) {
  impl_->module = &module;
  impl_->all_parameters = module.parameters().size();
  impl_->start(find_module_state(module, options.ignored, what), options, make_reducer);
}

DdpCore::DdpCore(const ModuleState& state, ProcessGroup group, const DdpOptions& options,
                 const std::string& what)
    : impl_(std::make_unique<Impl>(std::move(group), what)) {
  if (state.reduced.empty())
    throw UsageError(what + ": no parameter needs a gradient",
                     "give it the parameters that are trained");
  impl_->wrapped = false;
  impl_->start(state, options, {});
}

DdpCore::~DdpCore() = default;
DdpCore::DdpCore(DdpCore&&) noexcept = default;
DdpCore& DdpCore::operator=(DdpCore&&) noexcept = default;

void DdpCore::before_forward() {
  impl_->iterations += impl_->synchronizing ? 1 : 0;
  if (!impl_->reducer) return;
  impl_->active = Join::notify_join_context(*impl_);
  if (c10::GradMode::is_enabled()) {
    impl_->check_complete();
    impl_->follow_module();
    impl_->forwarded = true;
    impl_->reducer->before_forward(impl_->synchronizing);
  }
  impl_->broadcast_buffers(false);
  if (impl_->joins()) impl_->agree_to_reduce(impl_->synchronizing);
}

bool DdpCore::wants_outputs() const {
  return impl_->reducer && impl_->reducer->wants_outputs();
}

void DdpCore::after_forward(std::vector<at::Tensor>& outputs) {
  if (c10::GradMode::is_enabled()) impl_->adding_up = !impl_->synchronizing;
  if (!impl_->reducer) return;
  const bool synchronizes = impl_->synchronizing && c10::GradMode::is_enabled();
  const bool will_reduce = synchronizes && !impl_->all_frozen;
  if (impl_->active) {
    const int ranks = impl_->active->wait();
    impl_->active.reset();
    if (!impl_->divides_by_size) impl_->reducer->set_divisor(ranks);
  }
  // After a forward whose gradients stay local the buffers stay local too, as in Python.
  impl_->sync_buffers = synchronizes;
  if (will_reduce) {
    impl_->group.note_steps(++impl_->steps);
    ++impl_->awaited;
  }
  impl_->reducer->before_backward(outputs, will_reduce);
}

bool& DdpCore::synchronizing() {
  return impl_->synchronizing;
}

bool DdpCore::adding_up() const {
  return impl_->adding_up;
}

Joinable& DdpCore::joinable() {
  return *impl_;
}

void DdpCore::share_buffers() {
  if (impl_->group.size() > 1) broadcast_tensors(impl_->buffers, impl_->group);
}

const ProcessGroup& DdpCore::group() const {
  return impl_->group;
}

DdpStatistics DdpCore::statistics() const {
  DdpStatistics statistics;
  statistics.iterations = impl_->iterations;
  statistics.parameters = impl_->elements;
  if (impl_->reducer) impl_->reducer->fill(statistics);
  return statistics;
}

}  // namespace lockstep::detail
