#include "lockstep/parallel/fsdp/fsdp.h"

#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/optim/clip.h"
#include "lockstep/parallel/fsdp/sharded_gradients.h"
#include "lockstep/parallel/fsdp/sharded_parameters.h"
#include "lockstep/parallel/module_state.h"
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
