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

/// Where the first parameter is that has memory.
c10::Device device_of(const ModuleState& state) {
  for (const NamedTensor& item : state.parameters)
    if (!is_deferred(item.tensor)) return item.tensor.device();
  return c10::kCPU;
}

/// How a state of the whole module's parameters is spread, by their indices.
StateSpread spread_of(const ShardedParameters& parameters) {
  StateSpread spread{parameters.group(), {}, {}, /*always_vectors=*/true};
  for (const FlatUnit& unit : parameters.units()) {
    for (const FlatParameter& parameter : unit.parameters) {
      const size_t count = std::max(spread.parameters.size(), parameter.index + 1);
      spread.parameters.resize(count);
      spread.parts.resize(count);
      spread.parameters[parameter.index] = parameter.tensor;
      spread.parts[parameter.index] = unit.part(parameters.group().rank(), parameter);
    }
  }
  return spread;
}

class Fsdp final : public FsdpCore {
 public:
  Fsdp(std::shared_ptr<torch::nn::Module> module, const ProcessGroup& group,
       const ProcessGroup& replicate, const FsdpOptions& options, std::optional<c10::Device> device)
      : module_(std::move(module)), replicate_(replicate) {
    if (!group) throw UsageError(std::string(kName) + ": the process group is null");
    const ModuleState state = whole_module_state(*module_);
    if (state.parameters.empty())
      throw UsageError(std::string(kName) + ": the module has no parameters",
                       "use the module as it is: there is nothing to shard");
    all_ = group.size() * (replicate_ ? replicate_.size() : 1);
    const bool syncs = all_ > 1 && options.init_sync;
    if (syncs && replicate_) start_alike(state, replicate_, kName);
    if (syncs) start_alike(state, group, kName);
    parameters_ = std::make_unique<ShardedParameters>(
        lay_out(plan_units(*module_, options.units, options.min_unit_elements), *module_,
                group.size()),
        group, options, device.value_or(device_of(state)));
    initialise(state, syncs);
    parameters_->adopt_module();
    for (const NamedTensor& item : state.buffers) buffers_.push_back(item.tensor);
    broadcasts_buffers_ = options.broadcast_buffers && all_ > 1;
    optimizer_.spread = spread_of(*parameters_);
    make_shards();
    gradients_ = std::make_unique<ShardedGradients>(*parameters_, shards_, replicate_, options);
    if (!shards_.empty()) return;
    // Optimizers want at least one.
    const auto dtype = parameters_->shard(0).options();
    shards_.push_back(at::empty({0}, dtype).requires_grad_());
    optimizer_.indices.push_back(SpreadOptimizer::kNone);
  }

  void before_forward() override {
    begin_use();
    if (c10::GradMode::is_enabled()) gradients_->follow_module();
    if (sync_buffers_) share_buffers();
  }
  void begin_use() override {
    gradients_->allow_module();
    check_complete();
    parameters_->take_values();
    parameters_->begin_round();
  }
  void after_forward(bool records, bool of_program) override {
    if (records && of_program) gradients_->expect_backward();
    // After a forward whose gradients stay local the buffers stay local too, as in Python's DDP.
    sync_buffers_ = gradients_->synchronizing() && records;
    if (sync_buffers_) {
      ++steps_;
      for (const ProcessGroup& waits : {group(), replicate_}) {
        if (waits) waits.note_steps(steps_);
      }
    }
    if (!records) parameters_->end_round();
  }
  void rethrow_failure() override { parameters_->rethrow_failure(); }
  void check_complete() override {
    const std::vector<std::string> missing = gradients_->missing_names();
    if (missing.empty()) return;
    gradients_->drop_incomplete();
    throw UsageError(
        std::string(kName) + ", rank " + std::to_string(group().rank()) +
            ": backward gave no gradient to " + join(missing, ", "),
        "set FsdpOptions::find_unused_parameters (--find-unused-parameters), freeze them "
        "(requires_grad_(false)), or use them in the loss");
  }
  void share_buffers() override {
    if (!broadcasts_buffers_) return;
    std::vector<at::Tensor> values;
    // Not their versions: a graph of an earlier forward may hold them.
    for (const at::Tensor& buffer : buffers_) values.push_back(buffer.variable_data());
    take_first(values);
  }
  /// All units are whole for as long, and backward leaves whole gradients in the module. A schedule
  /// that an error has ended goes on with the next.
  void begin_schedule() override {
    if (std::exchange(in_schedule_, true)) return;
    synchronizing() = false;
    gradients_->allow_module();
    gradients_->follow_module();
    begin_full(/*writable=*/false);
  }
  void end_schedule() override {
    in_schedule_ = false;
    end_full();
  }
  void reduce_accumulated() override { gradients_->reduce_accumulated(); }
  bool& synchronizing() override { return gradients_->synchronizing(); }

  const std::vector<at::Tensor>& shards() const override { return shards_; }
  const ProcessGroup& group() const override { return parameters_->group(); }
  double clip_grad_norm(double max_norm) override {
    if (gradients_->has_local())
      throw UsageError(std::string(kName) + ": clip_grad_norm while gradients only add up",
                       "run the step's last forward and backward outside of no_sync first");
    return clip_shards(gradients_of(shards_), max_norm, group());
  }

  SpreadModel spread_model() override {
    parameters_->take_values();
    return model();
  }
  const SpreadOptimizer& spread_optimizer() const override { return optimizer_; }
  StateDict model_state() override { return spread_model().gather(); }
  void load_model_state(const StateDict& state, const std::string& source) override {
    parameters_->end_round();
    model().load(state, source);
  }
  std::vector<TensorShard> sharded_state() const override { return model().shards(); }
  void load_sharded_state(const std::vector<TensorShard>& given,
                          const std::string& source) override {
    parameters_->end_round();
    model().load(given, source);
  }
  StateDict optimizer_state(const StateDict& own) override { return optimizer_.gather(own); }
  StateDict own_optimizer_state(const StateDict& whole, const std::string& source) override {
    auto [trained, frozen] = optimizer_.own_part(whole, source);
    optimizer_.frozen = std::move(frozen);
    return trained;
  }

  void begin_full(bool writable) override {
    parameters_->take_values();
    parameters_->begin_full(writable);
  }
  void end_full() override { parameters_->end_full(); }

  int64_t parameter_bytes() const override {
    int64_t bytes = 0;
    for (size_t u = 0; u < parameters_->units().size(); ++u)
      bytes += static_cast<int64_t>(parameters_->shard(u).nbytes());
    return bytes;
  }
  int64_t gradient_bytes() const override { return gradients_->bytes(); }
  FsdpStatistics statistics() const override {
    FsdpStatistics statistics;
    for (const FlatUnit& unit : parameters_->units()) {
      statistics.units.push_back(unit.name);
      statistics.unit_elements.push_back(unit.length());
    }
    statistics.shared_memory = parameters_->shared();
    statistics.gathers = parameters_->gathers();
    statistics.foretold_gathers = parameters_->foretold_gathers();
    statistics.reductions = gradients_->reductions();
    return statistics;
  }

 private:
  /// Buffers are rank 0's.
  SpreadModel model() const {
    StateSpread spread = optimizer_.spread;
    const size_t count = spread.parameters.size();
    for (const at::Tensor& buffer : buffers_) {
      spread.parameters.push_back(buffer);
      spread.parts.push_back({0, group().rank() == 0 ? buffer.numel() : 0});
    }
    const auto values = [this, count](size_t i) {
      if (i >= count) return buffers_[i - count].detach();
      for (const Piece& piece : parameters_->pieces()) {
        if (parameters_->parameter_of(piece).index == i) return shard(piece);
      }
      return at::Tensor();
    };
    const auto store = [this](size_t i, const at::Tensor& whole) {
      parameters_->set_values(optimizer_.spread.parameters[i], whole);
    };
    return {*module_, spread.parameters, count, spread, values, store};
  }

  /// Those of the first rank of the first replica, for all.
  void take_first(const std::vector<at::Tensor>& values) const {
    for (const ProcessGroup& ranks : {replicate_, group()}) {
      if (ranks && ranks.size() > 1) broadcast_tensors(values, ranks);
    }
  }

  at::Tensor shard(const Piece& piece) const {
    return parameters_->shard(piece.unit).narrow(0, piece.shard_offset, piece.size);
  }

  /// Runs what deferred_init has noted, and keeps rank 0's values.
  void initialise(const ModuleState& state, bool syncs) {
    run_deferred(*module_, [&](const at::Tensor& deferred, const at::Tensor& made) {
      at::Tensor values = made.contiguous();
      if (syncs) take_first({values});
      values = values.to(parameters_->device());
      const auto is_it = [&](const NamedTensor& item) { return item.tensor.is_same(deferred); };
      if (std::ranges::any_of(state.parameters, is_it))
        return parameters_->set_values(deferred, values);
      deferred.unsafeGetTensorImpl()->shallow_copy_from(values.clone().getIntrusivePtr());
    });
  }

  void make_shards() {
    for (const Piece& piece : parameters_->pieces()) {
      const FlatParameter& parameter = parameters_->parameter_of(piece);
      if (!parameter.tensor.requires_grad()) continue;
      optimizer_.indices.push_back(parameter.index);
      shards_.push_back(shard(piece).detach().requires_grad_());
    }
  }

  std::shared_ptr<torch::nn::Module> module_;
  const ProcessGroup replicate_;
  int all_ = 1;  ///< Ranks of all replicas.
  bool in_schedule_ = false;
  std::vector<at::Tensor> buffers_;
  bool broadcasts_buffers_ = false;  ///< Before a forward.
  bool sync_buffers_ = true;
  int64_t steps_ = 0;  ///< Forwards whose gradients are reduced.
  std::unique_ptr<ShardedParameters> parameters_;
  SpreadOptimizer optimizer_;
  std::vector<at::Tensor> shards_;  ///< What the optimizer updates.
  std::unique_ptr<ShardedGradients> gradients_;
};

}  // namespace

std::unique_ptr<FsdpCore> make_fsdp_core(std::shared_ptr<torch::nn::Module> module,
                                         const ProcessGroup& group, const ProcessGroup& replicate,
                                         const FsdpOptions& options,
                                         std::optional<c10::Device> device) {
  return std::make_unique<Fsdp>(std::move(module), group, replicate, options, device);
}

}  // namespace lockstep::detail
