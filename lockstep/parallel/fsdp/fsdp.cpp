#include "lockstep/parallel/fsdp/fsdp.h"

#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/optimizer_state.h"
#include "lockstep/parallel/fsdp/deferred_init.h"
#include "lockstep/parallel/fsdp/shard_state.h"
#include "lockstep/parallel/fsdp/sharded_gradients.h"
#include "lockstep/parallel/fsdp/sharded_parameters.h"
#include "lockstep/parallel/module_state.h"
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

}  // namespace

struct FsdpCore::Impl {
  std::shared_ptr<torch::nn::Module> module;
  std::vector<at::Tensor> buffers;  ///< Those that are broadcast before a forward.
  bool sync_buffers = true;
  int64_t steps = 0;  ///< Forwards whose gradients are reduced.
  std::unique_ptr<ShardedParameters> parameters;
  StateDict frozen_state;          ///< What a loaded state has of parameters that are frozen.
  std::vector<at::Tensor> shards;  ///< What the optimizer updates.
  std::vector<size_t> indices;     ///< The parameters of which they are parts.
  std::unique_ptr<ShardedGradients> gradients;

  /// What this rank has of the optimizer's state, by the whole's indices.
  StateDict local_state(const StateDict& own) const;

  Impl(std::shared_ptr<torch::nn::Module> wrapped, const ProcessGroup& group,
       const FsdpOptions& options, c10::Device device)
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
        group, options, device);
    if (has_deferred(state)) initialise(syncs);
    parameters->adopt_module();
    convert_buffers(state, options);
    make_shards();
    gradients = std::make_unique<ShardedGradients>(*parameters, shards, options);
    if (!shards.empty()) return;
    // Optimizers want at least one.
    const auto dtype = parameters->shard(0).options();
    shards.push_back(at::empty({0}, dtype).requires_grad_());
    indices.push_back(0);
  }

  /// A rank without parameters that are trained has an optimizer of one tensor without elements.
  bool has_trained() const { return shards.front().numel() > 0; }

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
      if (options.broadcast_buffers && parameters->group().size() > 1) buffers.push_back(buffer);
    }
  }

  void make_shards() {
    for (const Piece& piece : parameters->pieces()) {
      const FlatParameter& parameter = parameters->parameter_of(piece);
      if (!parameter.tensor.requires_grad()) continue;
      indices.push_back(parameter.index);
      shards.push_back(parameters->shard(piece.unit)
                           .narrow(0, piece.shard_offset, piece.size)
                           .detach()
                           .requires_grad_());
    }
  }
};

FsdpCore::FsdpCore(std::shared_ptr<torch::nn::Module> module, const ProcessGroup& group,
                   const FsdpOptions& options, c10::Device device)
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

StateDict FsdpCore::model_state() {
  impl_->parameters->take_values();
  return gather_model_state(*impl_->module, *impl_->parameters);
}

void FsdpCore::load_model_state(const StateDict& state, const std::string& source) {
  impl_->parameters->end_round();
  detail::load_model_state(*impl_->module, *impl_->parameters, state, source);
}

std::vector<Shard> FsdpCore::sharded_state() const {
  return shards_of(*impl_->module, *impl_->parameters);
}

void FsdpCore::load_sharded_state(const std::vector<Shard>& given, const std::string& source) {
  impl_->parameters->end_round();
  load_shards(*impl_->module, *impl_->parameters, given, source);
}

StateDict FsdpCore::Impl::local_state(const StateDict& own) const {
  StateDict local = frozen_state;
  for (auto& entry : by_whole_index(has_trained() ? own : StateDict(), indices))
    local.push_back(std::move(entry));
  return local;
}

StateDict FsdpCore::optimizer_state(const StateDict& own) {
  return gather_state(spread_of(*impl_->parameters), impl_->local_state(own), 0, kName);
}

StateDict FsdpCore::own_optimizer_state(const StateDict& whole, const std::string& source) {
  StateDict trained, frozen;
  for (auto& [key, tensor] : cut_state(spread_of(*impl_->parameters), whole, source)) {
    const auto& all = impl_->indices;
    const bool is_trained =
        impl_->has_trained() &&
        std::find(all.begin(), all.end(), parse_state_key(key).index) != all.end();
    is_trained ? trained.emplace_back(key, tensor) : frozen.emplace_back(key, tensor.clone());
  }
  impl_->frozen_state = std::move(frozen);
  return by_own_index(trained, impl_->indices);
}

std::vector<TensorShard> FsdpCore::model_shards() {
  impl_->parameters->take_values();
  return detail::model_shards(*impl_->module, *impl_->parameters);
}

std::vector<TensorShard> FsdpCore::optimizer_shards(const StateDict& own) const {
  return state_shards(spread_of(*impl_->parameters), impl_->local_state(own));
}

std::map<std::string, std::vector<TensorBox>> FsdpCore::needed_of_model() const {
  return detail::needed_of_model(*impl_->module, *impl_->parameters);
}

std::map<size_t, std::vector<TensorBox>> FsdpCore::needed_of_optimizer() const {
  return needed_state(spread_of(*impl_->parameters));
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
