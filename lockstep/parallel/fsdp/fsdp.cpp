#include "lockstep/parallel/fsdp/fsdp.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/autograd/backward_hook.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/parallel/fsdp/sharded_parameters.h"
#include "lockstep/parallel/fsdp/watched_memory.h"
#include "lockstep/parallel/gradient_tracker.h"
#include "lockstep/parallel/module_state.h"
#include "lockstep/parallel/scaled_copy.h"
#include "lockstep/parallel/spread_state.h"
#include "lockstep/parallel/whole_model.h"

namespace lockstep::detail {
namespace {

constexpr const char* kName = "FullyShardedDataParallel";

std::vector<at::Tensor> tensors_of(const std::vector<NamedTensor>& items) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& item : items) {
    if (!is_deferred(item.tensor)) tensors.push_back(item.tensor.detach());
  }
  return tensors;
}

bool has_deferred(const ModuleState& state) {
  const auto deferred = [](const NamedTensor& item) { return is_deferred(item.tensor); };
  return std::any_of(state.parameters.begin(), state.parameters.end(), deferred) ||
         std::any_of(state.buffers.begin(), state.buffers.end(), deferred);
}

/// Where the first parameter is that has memory.
c10::Device device_of(const ModuleState& state) {
  for (const NamedTensor& item : state.parameters)
    if (!is_deferred(item.tensor)) return item.tensor.device();
  return c10::kCPU;
}

/// How a state of the whole module's parameters is spread, by their indices.
StateSpread spread_of(const ShardedParameters& parameters) {
  struct Place {
    int64_t offset, shard_size;
  };
  std::vector<Place> places;
  StateSpread spread{parameters.group(), {}, {}, /*always_vectors=*/true};
  for (const FlatUnit& unit : parameters.units()) {
    for (const FlatParameter& parameter : unit.parameters) {
      places.resize(std::max(places.size(), parameter.index + 1));
      spread.parameters.resize(places.size());
      places[parameter.index] = {parameter.offset, unit.shard_size};
      spread.parameters[parameter.index] = parameter.tensor;
    }
  }
  spread.part = [places = std::move(places), all = spread.parameters](int rank, size_t index) {
    const auto [offset, size] = places[index];
    const int64_t count = all[index].numel();
    const int64_t begin = std::clamp<int64_t>(rank * size - offset, 0, count);
    return Part{begin, std::clamp<int64_t>((rank + 1) * size - offset, begin, count)};
  };
  return spread;
}

/// Keeps the gradients of shards from being used while they only add up. An optimizer would else
/// find none, step without them, and nobody would know. Meanwhile each shard has a gradient without
/// values. What uses one throws UsageError.
class WithheldGradients final : private MemoryWatcher {
 public:
  /// `place` begins the error.
  WithheldGradients(std::vector<at::Tensor> shards, std::string place) : place_(std::move(place)) {
    for (at::Tensor& shard : shards) all_.push_back({std::move(shard), {}, {}});
  }

  void withhold() {
    if (std::exchange(withheld_, true)) return;
    const Unwatched unwatched;
    if (memories_.empty()) {
      MemoryWatcher& watcher = *this;
      memories_.reserve(all_.size());
      for (Withheld& one : all_) {
        memories_.emplace_back(watcher, memories_.size(), 1, one.shard.scalar_type(),
                               one.shard.device());
        // Not dense, so that nobody takes its memory without an operation.
        one.stand_in = memories_.back().tensor().expand(one.shard.sizes());
      }
    }
    for (Withheld& one : all_) {
      one.before = std::exchange(one.shard.mutable_grad(), one.stand_in);
    }
  }
  /// Gives the shards the gradients that they had. One whose gradient was dropped or replaced
  /// meanwhile keeps that.
  void release() {
    if (!std::exchange(withheld_, false)) return;
    for (Withheld& one : all_) {
      at::Tensor before = std::exchange(one.before, {});
      if (one.shard.grad().is_same(one.stand_in)) one.shard.mutable_grad() = std::move(before);
    }
  }

 private:
  struct Withheld {
    at::Tensor shard;
    at::Tensor before;  ///< The gradient that it had.
    at::Tensor stand_in;
  };
  void before_use(const std::vector<size_t>&) override {
    throw UsageError(place_ + ": a gradient of a shard was used while gradients only add up",
                     "run the last forward and backward of a step outside of no_sync, then step");
  }
  void after_use() noexcept override {}
  void before_write(size_t, const std::string&) override { before_use({}); }

  std::string place_;
  std::vector<Withheld> all_;
  std::vector<WatchedMemory> memories_;
  bool withheld_ = false;
};

/// Averages the gradients of a module's units over ranks while backward runs, into shards.
///
/// When all gradients of a unit are there, they are divided into a flat buffer and freed, and the
/// unit's parameters too. A reduce-scatter of the buffer adds this rank's shard to the gradients of
/// its pieces. Units are reduced in one order on all ranks: at first the opposite of the module's,
/// then that in which rank 0's first gradients came.
class ShardedGradients : private GradientReceiver {
 public:
  /// `pieces`: what the optimizer updates, one for each of `parameters.pieces()` that needs a
  /// gradient, in that order. They get gradients.
  ShardedGradients(ShardedParameters& parameters, std::vector<at::Tensor> pieces,
                   const FsdpOptions& options)
      : parameters_(parameters),
        pieces_(std::move(pieces)),
        reduce_dtype_(options.reduce_dtype),
        find_unused_(options.find_unused_parameters),
        units_(parameters.units().size()),
        withheld_(pieces_, place()) {
    std::vector<at::Tensor> tracked;
    for (size_t u = 0; u < units_.size(); ++u) {
      const auto& members = parameters_.units()[u].parameters;
      for (size_t i = 0; i < members.size(); ++i) {
        if (!members[i].tensor.requires_grad()) continue;
        units_[u].trainable.push_back(i);
        members_.push_back({u, i});
        tracked.push_back(members[i].tensor);
      }
      if (!units_[u].trainable.empty()) order_.insert(order_.begin(), u);
    }
    for (const Piece& piece : parameters_.pieces()) {
      const auto& tensor = parameters_.units()[piece.unit].parameters[piece.parameter].tensor;
      if (!tensor.requires_grad()) continue;
      units_[piece.unit].pieces.push_back(places_.size());
      places_.push_back(piece);
    }
    tracker_.track(tracked);
  }
  ShardedGradients(const ShardedGradients&) = delete;
  ShardedGradients& operator=(const ShardedGradients&) = delete;

  /// Whether the backwards to come reduce gradients. Without it they add up in the module's.
  bool& synchronizing() { return synchronizing_; }
  /// Before a forward. Goes on with parameters that have new nodes which add gradients. Throws
  /// UsageError for one that was frozen or unfrozen.
  void follow_module() {
    tracker_.refresh();
    for (size_t u = 0; u < units_.size(); ++u) {
      const auto& members = parameters_.units()[u].parameters;
      const auto& trainable = units_[u].trainable;
      for (size_t i = 0; i < members.size(); ++i) {
        const bool was = std::find(trainable.begin(), trainable.end(), i) != trainable.end();
        if (members[i].tensor.requires_grad() == was || parameters_.all_frozen()) continue;
        throw UsageError(place() + ": parameter " + members[i].name + " was " +
                             (was ? "frozen" : "unfrozen") + " after this was made",
                         "wrap the module anew, from full_state_dict(), after such a change");
      }
    }
  }
  /// Whether gradients wait in the module that were not reduced.
  bool has_local() const {
    for (size_t u = 0; u < units_.size(); ++u) {
      for (const size_t member : units_[u].trainable) {
        if (parameters_.units()[u].parameters[member].tensor.grad().defined()) return true;
      }
    }
    return false;
  }
  /// Names of the parameters that a backward left without a gradient; empty when it is complete.
  std::vector<std::string> missing() const {
    std::vector<std::string> names;
    for (const size_t index : tracker_.missing()) names.push_back(parameter(index).name);
    return names;
  }
  /// Drops what an incomplete backward has left.
  void forget() {
    for (size_t u = 0; u < units_.size(); ++u) {
      for (const size_t member : units_[u].trainable)
        at::Tensor(parameters_.units()[u].parameters[member].tensor).mutable_grad().reset();
    }
    withheld_.release();
    running_.clear();
    tracker_.forget();
  }
  /// Bytes of gradients that this rank keeps.
  int64_t bytes() const {
    int64_t bytes = 0;
    for (size_t u = 0; u < units_.size(); ++u) {
      if (units_[u].gradient.defined()) bytes += static_cast<int64_t>(units_[u].gradient.nbytes());
      for (const size_t member : units_[u].trainable) {
        const at::Tensor& gradient = parameters_.units()[u].parameters[member].tensor.grad();
        if (gradient.defined()) bytes += static_cast<int64_t>(gradient.nbytes());
      }
    }
    return bytes;
  }
  int64_t reductions() const { return reductions_; }

 private:
  struct Unit {
    std::vector<size_t> trainable;  ///< Indices of its parameters that need a gradient.
    size_t awaited = 0;             ///< Gradients of those.
    at::Tensor gradient;            ///< This rank's shard, with pieces' gradients in it.
    std::vector<size_t> pieces;     ///< Indices of this rank's.
  };
  /// A reduction that is under way.
  struct Reduction {
    size_t unit;
    at::Tensor staged;
    at::Tensor result;
    Work work;
  };
  /// A parameter that needs a gradient.
  struct Member {
    size_t unit;
    size_t parameter;  ///< In the unit.
  };

  void on_backward(size_t) override {
    refuse_distributed_autograd(place());
    parameters_.begin_backward();
    if (synchronizing_) withheld_.release();
    after_backward([this] { on_end(); });
  }
  bool begin_round() override {
    if (!synchronizing_) return false;
    for (Unit& unit : units_) unit.awaited = unit.trainable.size();
    if (!ordered_) arrivals_.clear();
    next_ = 0;
    complete_ = false;
    return true;
  }
  void take(size_t index) override {
    const size_t unit = members_[index].unit;
    if (--units_[unit].awaited > 0) return;
    if (!ordered_) arrivals_.push_back(unit);
    parameters_.release(unit);
    reduce_in_turn();
  }
  void end_round() override { complete_ = true; }
  void refuse_second(size_t index, bool, const std::vector<size_t>&) override {
    throw UsageError(place() + ": backward gave " + parameter(index).name + " its gradient twice",
                     "a module that is run again within backward (checkpointing) must not share "
                     "parameters with what runs outside of it, or run twice");
  }
  /// Backward has run all of its nodes.
  void on_end() {
    if (!synchronizing_) {
      withheld_.withhold();
      return parameters_.end_round();
    }
    if (!complete_ && !find_unused_) return;
    const c10::AutoGradMode no_grad(false);
    for (; next_ < order_.size(); ++next_)
      reduce(order_[next_], /*wait=*/next_ + 1 == order_.size());
    for (Reduction& reduction : std::exchange(running_, {})) take_result(std::move(reduction));
    if (!ordered_) agree_on_order();
    tracker_.forget();
    // No rank has finished the last reduction before all have begun it: nobody reads any more.
    parameters_.end_round(/*all_know=*/true);
  }
  const FlatParameter& parameter(size_t index) const {
    return parameters_.units()[members_[index].unit].parameters[members_[index].parameter];
  }
  /// All but the last, which waits for the end: then nothing is left to compute meanwhile.
  void reduce_in_turn() {
    const c10::AutoGradMode no_grad(false);
    for (; next_ + 1 < order_.size() && units_[order_[next_]].awaited == 0; ++next_)
      reduce(order_[next_], /*wait=*/false);
  }
  void reduce(size_t index, bool wait) {
    Unit& unit = units_[index];
    const at::Tensor staged = staging_buffer(index);
    stage(unit, index, staged);
    ++reductions_;
    const at::Tensor& shard = parameters_.shard(index);
    const bool first = std::none_of(unit.pieces.begin(), unit.pieces.end(),
                                    [&](size_t piece) { return pieces_[piece].grad().defined(); });
    if (!unit.gradient.defined()) unit.gradient = at::empty_like(shard);
    const bool direct =
        first && staged.scalar_type() == shard.scalar_type() && staged.device() == shard.device();
    at::Tensor result = direct
                            ? unit.gradient
                            : at::empty({parameters_.units()[index].shard_size}, staged.options());
    Reduction reduction{index, staged, result, {}};
    if (wait) {
      parameters_.group().reduce_scatter_tensor(result, staged);
    } else {
      reduction.work = parameters_.group().reduce_scatter_tensor_async(result, staged);
    }
    running_.push_back(std::move(reduction));
  }
  void stage(const Unit& unit, size_t index, const at::Tensor& staged) {
    const int size = parameters_.group().size();
    for (const size_t member : unit.trainable) {
      const FlatParameter& item = parameters_.units()[index].parameters[member];
      at::Tensor& gradient = at::Tensor(item.tensor).mutable_grad();
      const at::Tensor view = view_like(staged, item.offset, item.tensor);
      if (!gradient.defined()) {
        view.zero_();
        continue;
      }
      if (gradient.layout() != at::kStrided)
        throw UsageError(place() + ": the gradient of " + item.name + " is sparse",
                         "make it dense (sparse=false of an embedding)");
      if (gradient.scalar_type() == view.scalar_type()) {
        scaled_copy(view, gradient.detach(), 1.0 / size);
      } else {
        view.copy_(gradient.detach()).div_(size);
      }
      gradient.reset();
    }
  }
  at::Tensor staging_buffer(size_t unit) {
    // One is filled while another is reduced.
    constexpr size_t kBuffers = 2;
    if (running_.size() == kBuffers) {
      take_result(std::move(running_.front()));
      running_.erase(running_.begin());
    }
    if (buffers_.empty()) {
      int64_t bytes = 0;
      for (size_t u = 0; u < units_.size(); ++u) {
        const auto item = static_cast<int64_t>(c10::elementSize(reduce_dtype(u)));
        const int64_t elements = parameters_.units()[u].shard_size * parameters_.group().size();
        bytes = std::max(bytes, elements * item);
      }
      const int64_t lines = (bytes + 63) / 64 * 64;
      const size_t count = std::min(kBuffers, order_.size());
      for (size_t i = 0; i < count; ++i) {
        buffers_.push_back(
            parameters_.device().is_cpu()
                ? parameters_.group().symmetric_empty(lines, at::kByte)
                : at::empty({lines}, at::TensorOptions(parameters_.device()).dtype(at::kByte)));
        buffers_.back().zero_();  // What fills a shard up is summed as well.
      }
    }
    const at::Tensor& buffer = buffers_[turn_++ % buffers_.size()];
    return buffer.view(reduce_dtype(unit))
        .narrow(0, 0, parameters_.units()[unit].shard_size * parameters_.group().size());
  }
  /// The module's own zero_grad does not reach the shards' gradients, which then add up silently.
  void tell_if_kept(size_t piece) {
    if (told_kept_ || pieces_[piece]._version() == versions_[piece]) return;
    told_kept_ = true;
    log_warning(place() +
                ": gradients add up to those of before the last step, which were not cleared. Call "
                "zero_grad() of this or of its optimizer; the module's own does not reach shards");
  }
  void take_result(Reduction reduction) {
    if (reduction.work) reduction.work.wait();
    Unit& unit = units_[reduction.unit];
    for (const size_t index : unit.pieces) {
      const Piece& place = places_[index];
      at::Tensor& gradient = at::Tensor(pieces_[index]).mutable_grad();
      const at::Tensor part = reduction.result.narrow(0, place.shard_offset, place.size);
      if (gradient.defined()) {
        tell_if_kept(index);
        gradient.add_(part.to(gradient.options()));
        continue;
      }
      versions_[index] = pieces_[index]._version();
      gradient = unit.gradient.narrow(0, place.shard_offset, place.size);
      if (!reduction.result.is_same(unit.gradient)) gradient.copy_(part);
    }
  }
  /// Rank 0's, so that all ranks reduce alike.
  void agree_on_order() {
    ordered_ = true;
    // Where parameters may be unused, a rank does not know them all.
    if (!find_unused_ && parameters_.group().size() > 1 && order_.size() > 1)
      order_ = parameters_.group().broadcast_object(arrivals_, 0).get<std::vector<size_t>>();
    arrivals_ = {};
  }
  at::ScalarType reduce_dtype(size_t unit) const {
    return reduce_dtype_.value_or(
        parameters_.units()[unit].parameters.front().tensor.scalar_type());
  }
  std::string place() const {
    return "FullyShardedDataParallel, rank " + std::to_string(parameters_.group().rank());
  }

  ShardedParameters& parameters_;
  const std::vector<at::Tensor> pieces_;
  /// Versions of `pieces_` when their gradients were first set: a step changes them.
  std::vector<uint32_t> versions_ = std::vector<uint32_t>(pieces_.size());
  bool told_kept_ = false;
  std::vector<Piece> places_;  ///< Of `pieces_`.
  const std::optional<at::ScalarType> reduce_dtype_;
  const bool find_unused_;
  std::vector<Unit> units_;
  std::vector<size_t> order_;     ///< In which units are reduced.
  std::vector<size_t> arrivals_;  ///< In which they were complete, until the order follows it.
  size_t next_ = 0;               ///< In `order_`.
  bool ordered_ = false;
  bool complete_ = false;  ///< All gradients have come in this backward or before.
  bool synchronizing_ = true;
  std::vector<at::Tensor> buffers_;  ///< In turn.
  size_t turn_ = 0;
  std::vector<Reduction> running_;
  int64_t reductions_ = 0;
  WithheldGradients withheld_;
  std::vector<Member> members_;
  GradientTracker tracker_{*this};
};

}  // namespace

struct FsdpCore::Impl {
  std::shared_ptr<torch::nn::Module> module;
  std::vector<at::Tensor> buffers;
  bool broadcasts_buffers = false;  ///< Before a forward.
  bool sync_buffers = true;
  int64_t steps = 0;  ///< Forwards whose gradients are reduced.
  std::unique_ptr<ShardedParameters> parameters;
  SpreadOptimizer optimizer;
  std::vector<at::Tensor> shards;  ///< What the optimizer updates.
  std::unique_ptr<ShardedGradients> gradients;

  Impl(std::shared_ptr<torch::nn::Module> wrapped, const ProcessGroup& group,
       const FsdpOptions& options, std::optional<c10::Device> device)
      : module(std::move(wrapped)) {
    if (!group) throw UsageError(std::string(kName) + ": the process group is null");
    const ModuleState state = whole_module_state(*module);
    if (state.parameters.empty())
      throw UsageError(std::string(kName) + ": the module has no parameters",
                       "use the module as it is: there is nothing to shard");
    const bool syncs = group.size() > 1 && options.init_sync;
    if (syncs) {
      check_same_state(state, group, kName);
      broadcast_tensors(tensors_of(state.parameters), group);
      broadcast_tensors(tensors_of(state.buffers), group);
    }
    parameters = std::make_unique<ShardedParameters>(
        lay_out(plan_units(*module, options.units, options.min_unit_elements), *module,
                group.size()),
        group, options, device.value_or(device_of(state)));
    if (has_deferred(state)) initialise(syncs);
    parameters->adopt_module();
    convert_buffers(state, options);
    optimizer.spread = spread_of(*parameters);
    make_shards();
    gradients = std::make_unique<ShardedGradients>(*parameters, shards, options);
    if (!shards.empty()) return;
    // Optimizers want at least one.
    const auto dtype = parameters->shard(0).options();
    shards.push_back(at::empty({0}, dtype).requires_grad_());
    optimizer.indices.push_back(SpreadOptimizer::kNone);
  }

  /// Buffers are rank 0's.
  SpreadModel model() const {
    StateSpread spread = optimizer.spread;
    const size_t count = spread.parameters.size();
    spread.parameters.insert(spread.parameters.end(), buffers.begin(), buffers.end());
    spread.part = [this, count](int rank, size_t i) {
      if (i < count) return optimizer.spread.part(rank, i);
      return Part{0, rank == 0 ? buffers[i - count].numel() : 0};
    };
    const auto values = [this, count](size_t i) {
      if (i >= count) return buffers[i - count].detach();
      for (const Piece& piece : parameters->pieces()) {
        if (parameters->parameter_of(piece).index == i) return shard(piece);
      }
      return at::Tensor();
    };
    const auto store = [this](size_t i, const at::Tensor& whole) {
      parameters->set_values(optimizer.spread.parameters[i], whole);
    };
    return {*module, spread.parameters, count, spread, values, store};
  }

  at::Tensor shard(const Piece& piece) const {
    return parameters->shard(piece.unit).narrow(0, piece.shard_offset, piece.size);
  }

  /// Runs what deferred_init has noted, and keeps rank 0's values.
  void initialise(bool syncs) {
    run_deferred(*module, [&](const at::Tensor& deferred, const at::Tensor& made) {
      at::Tensor values = made.contiguous();
      if (syncs) parameters->group().broadcast(values, 0);
      values = values.to(parameters->device());
      if (is_parameter(deferred)) return parameters->set_values(deferred, values);
      deferred.unsafeGetTensorImpl()->shallow_copy_from(values.clone().getIntrusivePtr());
    });
  }

  bool is_parameter(const at::Tensor& tensor) const {
    for (const FlatUnit& unit : parameters->units()) {
      for (const FlatParameter& parameter : unit.parameters) {
        if (parameter.tensor.is_same(tensor)) return true;
      }
    }
    return false;
  }

  void convert_buffers(const ModuleState& state, const FsdpOptions& options) {
    for (const NamedTensor& item : state.buffers) {
      at::Tensor buffer = item.tensor;
      if (options.buffer_dtype && buffer.is_floating_point())
        buffer.set_data(buffer.detach().to(*options.buffer_dtype));
      buffers.push_back(buffer);
    }
    broadcasts_buffers = options.broadcast_buffers && parameters->group().size() > 1;
  }

  void make_shards() {
    for (const Piece& piece : parameters->pieces()) {
      const FlatParameter& parameter = parameters->parameter_of(piece);
      if (!parameter.tensor.requires_grad()) continue;
      optimizer.indices.push_back(parameter.index);
      shards.push_back(shard(piece).detach().requires_grad_());
    }
  }
};

FsdpCore::FsdpCore(std::shared_ptr<torch::nn::Module> module, const ProcessGroup& group,
                   const FsdpOptions& options, std::optional<c10::Device> device)
    : impl_(std::make_unique<Impl>(std::move(module), group, options, device)) {}

FsdpCore::~FsdpCore() = default;
FsdpCore::FsdpCore(FsdpCore&&) noexcept = default;
FsdpCore& FsdpCore::operator=(FsdpCore&&) noexcept = default;

void FsdpCore::check_complete() {
  const std::vector<std::string> missing = impl_->gradients->missing();
  if (missing.empty()) return;
  impl_->gradients->forget();
  throw UsageError(std::string(kName) + ", rank " + std::to_string(group().rank()) +
                       ": backward gave no gradient to " + join(missing, ", "),
                   "set FsdpOptions::find_unused_parameters, freeze them (requires_grad_(false)), "
                   "or use them in the loss");
}

void FsdpCore::before_forward() {
  begin_use();
  if (c10::GradMode::is_enabled()) impl_->gradients->follow_module();
  if (impl_->sync_buffers) share_buffers();
}

void FsdpCore::begin_use() {
  check_complete();
  impl_->parameters->take_values();
  impl_->parameters->begin_round();
}

void FsdpCore::rethrow_failure() {
  impl_->parameters->rethrow_failure();
}

void FsdpCore::after_forward(bool records) {
  // After a forward whose gradients stay local the buffers stay local too, as in Python's DDP.
  impl_->sync_buffers = impl_->gradients->synchronizing() && records;
  if (impl_->sync_buffers) group().note_steps(++impl_->steps);
  if (!records) impl_->parameters->end_round();
}

void FsdpCore::share_buffers() {
  if (!impl_->broadcasts_buffers) return;
  std::vector<at::Tensor> values;
  // Not their versions: a graph of an earlier forward may hold them.
  for (const at::Tensor& buffer : impl_->buffers) values.push_back(buffer.variable_data());
  broadcast_tensors(values, group());
}

bool& FsdpCore::synchronizing() {
  return impl_->gradients->synchronizing();
}

bool FsdpCore::has_local_gradients() const {
  return impl_->gradients->has_local();
}

const std::vector<at::Tensor>& FsdpCore::shards() const {
  return impl_->shards;
}

const ProcessGroup& FsdpCore::group() const {
  return impl_->parameters->group();
}

double FsdpCore::clip_grad_norm(double max_norm) {
  if (has_local_gradients())
    throw UsageError(std::string(kName) + ": clip_grad_norm while gradients only add up",
                     "run the step's last forward and backward outside of no_sync first");
  return clip_shards(gradients_of(shards()), max_norm, group());
}

SpreadModel FsdpCore::spread_model() {
  impl_->parameters->take_values();
  return impl_->model();
}

const SpreadOptimizer& FsdpCore::spread_optimizer() const {
  return impl_->optimizer;
}

StateDict FsdpCore::model_state() {
  return spread_model().gather(kName);
}

void FsdpCore::load_model_state(const StateDict& state, const std::string& source) {
  impl_->parameters->end_round();
  impl_->model().load(state, source);
}

std::vector<TensorShard> FsdpCore::sharded_state() const {
  return impl_->model().shards();
}

void FsdpCore::load_sharded_state(const std::vector<TensorShard>& given,
                                  const std::string& source) {
  impl_->parameters->end_round();
  impl_->model().load(given, source);
}

StateDict FsdpCore::optimizer_state(const StateDict& own) {
  return impl_->optimizer.gather(own, kName);
}

StateDict FsdpCore::own_optimizer_state(const StateDict& whole, const std::string& source) {
  auto [trained, frozen] = impl_->optimizer.own_part(whole, source);
  impl_->optimizer.frozen = std::move(frozen);
  return trained;
}

void FsdpCore::begin_full(bool writable) {
  impl_->parameters->take_values();
  impl_->parameters->begin_full(writable);
}

void FsdpCore::end_full() {
  impl_->parameters->end_full();
}

int64_t FsdpCore::parameter_bytes() const {
  int64_t bytes = 0;
  for (size_t u = 0; u < impl_->parameters->units().size(); ++u)
    bytes += static_cast<int64_t>(impl_->parameters->shard(u).nbytes());
  return bytes;
}

int64_t FsdpCore::gradient_bytes() const {
  return impl_->gradients->bytes();
}

FsdpStatistics FsdpCore::statistics() const {
  FsdpStatistics statistics;
  for (const FlatUnit& unit : impl_->parameters->units()) {
    statistics.units.push_back(unit.name);
    statistics.unit_elements.push_back(unit.shard_size * group().size());
  }
  statistics.shared_memory = impl_->parameters->shared();
  statistics.gathers = impl_->parameters->gathers();
  statistics.foretold_gathers = impl_->parameters->foretold_gathers();
  statistics.reductions = impl_->gradients->reductions();
  return statistics;
}

}  // namespace lockstep::detail
