#include "lockstep/parallel/ddp.h"

#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/comm/check_equal.h"
#include "lockstep/parallel/gradient_reducer.h"
#include "lockstep/parallel/gradient_tracker.h"
#include "lockstep/parallel/module_state.h"

namespace lockstep::detail {
namespace {

/// One of the user's, which a Join cannot run for other ranks.
bool has_own_hook(const DdpOptions& options) {
  return options.custom_hook || options.async_custom_hook;
}

bool changes_bits(const DdpOptions& options) {
  return has_own_hook(options) || options.comm_hook == CommHook::fp16_compress ||
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

/// What DistributedDataParallel and GradientAverager do.
class Ddp final : public DdpCore, GradientTracker {
 public:
  /// `module` lives on. Forwards tell of themselves where it is `wrapped`.
  Ddp(ProcessGroup group, std::string what, const torch::nn::Module* module, bool wrapped,
      ModuleState state, const DdpOptions& options, const ReducerFactory& make_reducer)
      : DdpCore(std::move(group)),
        what_(std::move(what)),
        counted_(module),
        module_(wrapped ? module : nullptr),
        all_parameters_(module ? module->parameters().size() : 0),
        fixed_(make_reducer != nullptr),
        options_(options),
        checks_drift_(options.check_drift && !has_own_hook(options)),
        state_(std::move(state)) {
    if (!group_)
      throw UsageError(what_ + ": the process group is null",
                       "ranks that are not in a group must not wrap a module with it");
    if (state_.reduced.empty())
      throw UsageError(what_ + ": no parameter needs a gradient",
                       "give it the parameters that are trained");
    check_values(state_, what_);
    if (group_.size() > 1 || changes_bits(options_)) prepare(make_reducer);
  }

  void before_forward() override {
    iterations_ += synchronizing_ ? 1 : 0;
    if (!reducer_) return;
    active_ = Join::notify_join_context(*this);
    if (c10::GradMode::is_enabled()) {
      check_complete();
      follow_module();
      forwarded_ = true;
      reducer_->before_forward();
      if (synchronizing_) {
        check_drift();
        ++averaging_forwards_;
      }
    }
    broadcast_buffers(false);
    if (joins()) agree_to_reduce(synchronizing_);
  }

  void after_forward() override {
    if (c10::GradMode::is_enabled()) adding_up_ = !synchronizing_;
    if (!reducer_) return;
    const bool synchronizes = synchronizing_ && c10::GradMode::is_enabled();
    if (active_) {
      const int ranks = active_->wait();
      active_.reset();
      if (!divides_by_size_) reducer_->set_divisor(ranks);
    }
    // After a forward whose gradients stay local the buffers stay local too, as in Python.
    sync_buffers_ = synchronizes;
    if (!synchronizes || all_frozen_) return;
    group_.note_steps(++steps_);
    ++awaited_;
  }

  void share_buffers() override {
    if (group_.size() > 1) broadcast_tensors(buffers_, group_);
  }

  DdpStatistics statistics() const override {
    DdpStatistics statistics;
    statistics.iterations = iterations_;
    for (const ReducedParameter& parameter : state_.reduced)
      statistics.parameters += parameter.tensor.numel();
    if (reducer_) reducer_->fill(statistics);
    return statistics;
  }

  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override {
    checks_drift_ = false;  // From then on ranks have made different numbers of steps.
    if (has_own_hook(options_))
      throw UsageError("Join: a DistributedDataParallel with a hook of the user's own",
                       "join one without a hook, or with a CommHook");
    divides_by_size_ = options.divide_by_initial_world_size;
    return std::make_unique<Hook>(*this);
  }

 private:
  /// What this does on a rank without inputs.
  class Hook : public JoinHook {
   public:
    explicit Hook(Ddp& ddp) : ddp_(ddp) {}

    void main_hook() override {
      if (!ddp_.reducer_) return;
      ddp_.reducer_->before_forward();
      ddp_.broadcast_buffers(true);
      ddp_.sync_buffers_ = ddp_.agree_to_reduce(false);
      if (ddp_.sync_buffers_) ddp_.reducer_->reduce_zeros();
    }

    void post_hook(bool is_last_joiner) override {
      if (!ddp_.reducer_) return;
      const int src = ddp_.common_rank(is_last_joiner);
      std::vector<at::Tensor> tensors = ddp_.values();
      tensors.insert(tensors.end(), ddp_.buffers_.begin(), ddp_.buffers_.end());
      broadcast_tensors(tensors, ddp_.group_, src);
      ddp_.reducer_->set_divisor(ddp_.group_.size());
      ddp_.sync_buffers_ = true;
    }

   private:
    Ddp& ddp_;
  };

  void prepare(const ReducerFactory& make_reducer) {
    if (options_.broadcast_buffers) {
      for (const NamedTensor& item : state_.buffers) buffers_.push_back(item.tensor);
    }
    if (options_.init_sync) {
      check_same_state(state_, group_, what_);
      std::vector<at::Tensor> tensors = values();
      tensors.insert(tensors.end(), buffers_.begin(), buffers_.end());
      broadcast_tensors(tensors, group_);
    }
    set_up_reducer(make_reducer);
    if (!module_) watch_all();
  }

  /// The parameters' memory as it is now.
  std::vector<at::Tensor> values() const {
    std::vector<at::Tensor> values;
    for (const NamedTensor& item : state_.parameters) values.push_back(item.tensor.detach());
    return values;
  }

  void set_up_reducer(const ReducerFactory& make_reducer) {
    kinds_.clear();
    for (const NamedTensor& item : state_.parameters) kinds_.emplace_back(item.tensor);
    std::vector<at::Tensor> tracked;
    for (const ReducedParameter& parameter : state_.reduced) tracked.push_back(parameter.tensor);
    track(std::move(tracked));
    reducer_ = make_reducer ? make_reducer(state_.reduced)
                            : make_bucket_reducer(state_.reduced, group_, options_, caller());
    set_rules(reducer_->rules());
  }

  /// Between steps. All ranks have averaged as often, but one may have left out a backward.
  void check_drift() {
    if (!checks_drift_ || !is_compared_after(rounds_) ||
        std::exchange(compared_, rounds_) == rounds_)
      return;
    Compared mine{.what = what_, .steps = rounds_};
    mine.settings = {{"number of forwards", static_cast<double>(averaging_forwards_)}};
    for (const NamedTensor& item : state_.parameters)
      mine.tensors.emplace_back(item.name, item.tensor.detach());
    check_equal(mine, group_);
  }

  void watch_all() {
    std::vector<at::Tensor> others;
    for (const NamedTensor& item : state_.parameters) {
      if (item.tensor.requires_grad()) continue;
      frozen_.push_back(item);
      others.push_back(item.tensor);
    }
    watch(others);
  }

  /// At the first step and every 100th, as it takes a walk through the module.
  void expect_all_parameters() {
    if (!counted_ || forwards_++ % 100 != 0) return;
    const size_t now = counted_->parameters().size();
    if (now == all_parameters_) return;
    throw UsageError(place() + ": the module has " +
                         counted(static_cast<int64_t>(now), "parameter") + ", and had " +
                         std::to_string(all_parameters_) +
                         " when this was made: new ones would not be averaged",
                     "make this after the module's last layer was added");
  }

  /// Before a forward. Values that were put into the module (torch::load, set_data) may come with
  /// other nodes that add gradients, and layers may have been frozen or unfrozen.
  void follow_module() {
    expect_all_parameters();
    const auto is_frozen = [](const NamedTensor& item) { return !item.tensor.requires_grad(); };
    all_frozen_ = std::all_of(state_.parameters.begin(), state_.parameters.end(), is_frozen);
    if (all_frozen_) return;
    refresh();
    const NamedTensor* const changed = find_changed();
    if (!changed) return;
    if (fixed_ || has_own_hook(options_)) refuse(*changed);
    state_.reduced = state_.parameters;
    std::erase_if(state_.reduced, is_frozen);
    // A rank that sees no change makes another call, which the comparison of calls finds.
    check_same_state(state_, group_, what_);
    reducer_.reset();
    set_up_reducer({});
  }

  /// A parameter that was frozen or unfrozen. Throws for one of another dtype or shape, and, on all
  /// ranks, where values were put in on some only.
  const NamedTensor* find_changed() {
    const NamedTensor* changed = nullptr;
    std::vector<size_t> moved;
    for (size_t i = 0; i < kinds_.size(); ++i) {
      const NamedTensor& item = state_.parameters[i];
      if (kinds_[i].needs_gradient)
        expect_kind(place(), item.name, item.tensor, kinds_[i].dtype, kinds_[i].sizes);
      if (item.tensor.requires_grad() != kinds_[i].needs_gradient) changed = &item;
      if (kinds_[i].memory._unsafe_get_target() == item.tensor.storage().unsafeGetStorageImpl())
        continue;
      kinds_[i].memory = item.tensor.storage().getWeakStorageImpl();
      moved.push_back(i);
    }
    // In a Join some ranks make no forward.
    if (!moved.empty() && !joins()) check_same_on_all(moved, group_, what_);
    return changed;
  }

  [[noreturn]] void refuse(const NamedTensor& item) const {
    throw UsageError(place() + ": parameter " + item.name +
                         " was frozen, unfrozen or given other memory after this was made",
                     "make this anew after such a change");
  }

  void on_other(size_t index) override { refuse(frozen_[index]); }

  void on_new_node(size_t) override { find_changed(); }

  void on_backward(size_t index) override {
    if (!module_ || forwarded_) return;
    throw UsageError(place() + ": backward gives " + state_.reduced[index].name +
                         " a gradient, but forward of the wrapper was never called: ranks would "
                         "drift apart",
                     "call ddp.forward(...) in place of the module's own forward, or take a "
                     "GradientAverager, which needs no wrapper");
  }

  bool begin_round() override {
    if (!synchronizing_ || (module_ && awaited_ == 0)) return false;
    if (!module_) follow_averaged();
    ++rounds_;
    reducer_->begin();
    graph_is_kept_ = keeps_graph();
    if (!module_) group_.note_steps(++iterations_);
    return true;
  }

  /// Without a wrapper a step begins with its first gradient.
  void follow_averaged() {
    expect_all_parameters();
    if (const NamedTensor* const changed = find_changed()) refuse(*changed);
    check_drift();
  }

  void take(size_t index) override {
    graph_is_kept_ = graph_is_kept_ || keeps_graph();
    if (reducer_->arrived(index)) reducer_->reduce_in_turn();
  }

  void end_round() override {
    reducer_->finish();
    if (!graph_is_kept_) awaited_ = std::max<int64_t>(0, awaited_ - 1);
  }

  void refuse_second(size_t index, bool same_backward,
                     const std::vector<size_t>& missing) override {
    // The backward before may have thrown. Then the one after this is to be a fresh one.
    awaited_ = 0;
    const std::string& name = state_.reduced[index].name;
    if (module_ || same_backward)
      throw UsageError(
          place() + ": backward gave " + name + " its gradient twice",
          options_.static_graph ? "static_graph: the graph must stay what it was in the step before"
          : fixed_              ? "run the module once in each batch, and its backward once"
                   : "a module that is run again in backward (checkpointing) or outside of this "
                     "forward needs DistributedDataParallel with DdpOptions::static_graph");
    throw UsageError(
        place() + ": backward gives " + name +
            " a second gradient, but gave none yet to: " + join(names_of(missing), ", "),
        "average only parameters that every step uses, or take "
        "DistributedDataParallel with find_unused_parameters. Where the backward "
        "before threw on all ranks alike, zero the gradients and go on: this comes "
        "once. Else end the run");
  }

  std::vector<std::string> names_of(const std::vector<size_t>& indices) const {
    std::vector<std::string> names;
    for (const size_t index : indices) names.push_back(state_.reduced[index].name);
    return names;
  }

  /// Throws where the last backward left parameters without a gradient.
  void check_complete() {
    const std::vector<size_t> lacking = missing();
    if (lacking.empty()) return;
    forget();
    awaited_ = 0;
    throw UsageError(
        place() + ": the last backward gave no gradient to these parameters: " +
            join(names_of(lacking), ", "),
        fixed_ ? "make the loss depend on them in every batch, or freeze them"
               : "set DdpOptions::find_unused_parameters (--find-unused-parameters; or "
                 "static_graph, when they are the same in every step), or make the loss depend on "
                 "every output of forward");
  }

  const char* caller() const { return module_ ? "DistributedDataParallel" : "GradientAverager"; }

  std::string place() const { return what_ + ", rank " + std::to_string(group_.rank()); }

  /// A number for the others, where the group communicates.
  at::Tensor number(int64_t value) const {
    return at::full(
        {1}, value,
        state_.parameters.front().tensor.options().dtype(at::kLong).requires_grad(false));
  }

  /// The largest rank for which `candidate` holds: all ranks agree on it.
  int common_rank(bool candidate) const {
    at::Tensor rank = number(candidate ? group_.rank() : -1);
    group_.all_reduce(rank, ReduceOp::max);
    return static_cast<int>(rank.item<int64_t>());
  }

  /// Before a forward. `joined`: this rank has no inputs left. Then its buffers do not count.
  void broadcast_buffers(bool joined) {
    if (!sync_buffers_ || buffers_.empty()) return;
    std::vector<at::Tensor> values;
    // Not their versions: a graph of an earlier forward may hold them.
    for (const at::Tensor& buffer : buffers_) values.push_back(buffer.variable_data());
    broadcast_tensors(values, group_, joins() ? common_rank(!joined) : 0);
  }

  /// Whether ranks that have inputs average gradients in this iteration.
  bool agree_to_reduce(bool mine) const {
    at::Tensor wishes = number(mine ? 1 : 0);
    group_.all_reduce(wishes, ReduceOp::max);
    return wishes.item<int64_t>() > 0;
  }

  const std::string what_;                  ///< For messages.
  const torch::nn::Module* const counted_;  ///< Which is to keep its parameters, or null.
  const torch::nn::Module* const module_;   ///< Whose forwards tell of themselves, or null.
  const size_t all_parameters_;             ///< Of the module, when it was wrapped.
  std::vector<at::Tensor> buffers_;         ///< Those that are broadcast before a forward.
  int64_t iterations_ = 0;
  int64_t steps_ = 0;  ///< That average gradients.
  const bool fixed_;   ///< The reducer is the caller's own.
  const DdpOptions options_;
  bool checks_drift_;
  int64_t rounds_ = 0;              ///< That were averaged.
  int64_t compared_ = 0;            ///< After which of them ranks compared their parameters last.
  int64_t averaging_forwards_ = 0;  ///< That were to be averaged.
  bool forwarded_ = false;          ///< One has.
  int64_t awaited_ = 0;             ///< Forwards whose backward is to average, and has not.
  bool graph_is_kept_ = false;      ///< By this round's backward, which uses no forward up then.
  bool sync_buffers_ = true;
  bool all_frozen_ = false;      ///< At the last forward, as a GAN's discriminator is at times.
  bool divides_by_size_ = true;  ///< Also while some ranks have no inputs left.
  int64_t forwards_ = 0;
  ModuleState state_;                     ///< Its `reduced` are the reducer's.
  std::vector<Kind> kinds_;               ///< Of the state's parameters, when the reducer was made.
  std::vector<ReducedParameter> frozen_;  ///< Of the parameters, when this was made.
  std::optional<ActiveRanks> active_;     ///< In the present iteration of a Join.
  /// Null when there is nothing to do around forward: one rank
  /// and no hook that changes bits.
  std::unique_ptr<GradientReducer> reducer_;
};

}  // namespace

std::unique_ptr<DdpCore> make_ddp_core(torch::nn::Module& module, const ProcessGroup& group,
                                       const DdpOptions& options,
                                       const ReducerFactory& make_reducer,
                                       const std::string& what) {
  return std::make_unique<Ddp>(group, what, &module, /*wrapped=*/true,
                               find_module_state(module, options.ignored, what), options,
                               make_reducer);
}

std::unique_ptr<DdpCore> make_averager_core(const ModuleState& state, const ProcessGroup& group,
                                            const DdpOptions& options, const std::string& what,
                                            const torch::nn::Module* module) {
  return std::make_unique<Ddp>(group, what, module, /*wrapped=*/false, state, options,
                               ReducerFactory());
}

}  // namespace lockstep::detail
