#include "lockstep/parallel/fsdp/sharded_gradients.h"

#include <algorithm>
#include <utility>

#include "lockstep/autograd/backward_hook.h"
#include "lockstep/base/error.h"
#include "lockstep/parallel/whole_model.h"

namespace lockstep::detail {
namespace {

/// The pieces by their parameters' indices.
std::vector<at::Tensor> by_index(const ShardedParameters& parameters,
                                 const std::vector<at::Tensor>& pieces) {
  std::vector<at::Tensor> parts;
  for (size_t next = 0; const Piece& piece : parameters.pieces()) {
    const FlatParameter& parameter = parameters.parameter_of(piece);
    if (!parameter.tensor.requires_grad()) continue;
    parts.resize(std::max(parts.size(), parameter.index + 1));
    parts[parameter.index] = pieces[next++];
  }
  return parts;
}

std::vector<ReducedParameter> trained_of(const ShardedParameters& parameters) {
  std::vector<ReducedParameter> trained;
  for (const FlatUnit& unit : parameters.units()) {
    for (const FlatParameter& parameter : unit.parameters) {
      if (parameter.tensor.requires_grad()) trained.push_back({parameter.name, parameter.tensor});
    }
  }
  return trained;
}

}  // namespace

ShardedGradients::ShardedGradients(ShardedParameters& parameters,
                                   const std::vector<at::Tensor>& pieces,
                                   const ProcessGroup& replicate, const FsdpOptions& options)
    : parameters_(parameters),
      find_unused_(options.find_unused_parameters),
      trained_(trained_of(parameters)),
      pieces_(pieces),
      withheld_(pieces_, place()),
      reducer_(parameters.units(), trained_, by_index(parameters, pieces), parameters.group(),
               {.what = place(),
                .caller = "FullyShardedDataParallel",
                .dtype = options.reduce_dtype,
                .fixed_order = find_unused_,
                .device = parameters.shard(0).device(),
                .replicate = replicate}) {
  std::vector<at::Tensor> tracked;
  for (const ReducedParameter& parameter : trained_) tracked.push_back(parameter.tensor);
  track(std::move(tracked));
}

bool ShardedGradients::begin_round() {
  if (!synchronizing_) return false;
  reducer_.begin();
  complete_ = false;
  return true;
}

std::string ShardedGradients::place() const {
  return "FullyShardedDataParallel, rank " + std::to_string(parameters_.group().rank());
}

void ShardedGradients::on_backward(size_t) {
  refuse_distributed_autograd(place());
  parameters_.begin_backward();
  keeps_graph_ = keeps_graph();
  if (synchronizing_) withheld_.release();
  after_backward([this] { on_end(); });
}

void ShardedGradients::take(size_t index) {
  if (!reducer_.arrived(index)) return;
  parameters_.release(reducer_.unit_of(index));
  reducer_.reduce_in_turn();
}

void ShardedGradients::refuse_second(size_t index, bool, const std::vector<size_t>&) {
  throw UsageError(place() + ": backward gave " + trained_[index].name + " its gradient twice",
                   "a module that is run again within backward (checkpointing) must not share "
                   "parameters with what runs outside of it, or run twice");
}

/// Backward has run all of its nodes.
void ShardedGradients::on_end() {
  if (!keeps_graph_) --expected_;
  if (!synchronizing_) {
    withheld_.withhold();
    return parameters_.end_round();
  }
  if (!complete_ && !find_unused_) return;
  reducer_.finish();
  forget();
  // No rank has finished the last reduction before all have begun it: nobody reads any more.
  parameters_.end_round(/*all_know=*/true);
  // Another backward would add to these.
  if (expected_ == 0 && !keeps_graph_ && !std::exchange(has_refused_, true)) refuse_module();
}

void ShardedGradients::refuse_module() {
  refuses_module_ = true;
  for (const ReducedParameter& parameter : trained_)
    parameter.tensor.mutable_grad() = parameters_.refused_gradient(parameter.tensor);
}

void ShardedGradients::allow_module() {
  if (!std::exchange(refuses_module_, false)) return;
  for (const ReducedParameter& parameter : trained_) parameter.tensor.mutable_grad().reset();
}

void ShardedGradients::follow_module() {
  refresh();
  auto next = trained_.begin();
  for (const FlatUnit& unit : parameters_.units()) {
    for (const FlatParameter& item : unit.parameters) {
      const bool was = next != trained_.end() && next->tensor.is_same(item.tensor);
      if (was) ++next;
      if (item.tensor.requires_grad() == was || parameters_.all_frozen()) continue;
      throw UsageError(place() + ": parameter " + item.name + " was " +
                           (was ? "frozen" : "unfrozen") + " after this was made",
                       "wrap the module anew, from full_state_dict(), after such a change");
    }
  }
}

bool ShardedGradients::has_local() const {
  return !refuses_module_ && std::ranges::any_of(trained_, [](const ReducedParameter& parameter) {
    return parameter.tensor.grad().defined();
  });
}

std::vector<std::string> ShardedGradients::missing_names() const {
  std::vector<std::string> names;
  for (const size_t index : missing()) names.push_back(trained_[index].name);
  return names;
}

void ShardedGradients::reduce_accumulated() {
  withheld_.release();
  for (const ReducedParameter& its : trained_) {
    if (!find_unused_ && !its.tensor.grad().defined() && its.tensor.numel() > 0)
      throw UsageError(place() + ": no micro-batch gave " + its.name + " a gradient",
                       "freeze it (requires_grad_(false)), use it in the loss, or set "
                       "FsdpOptions::find_unused_parameters");
  }
  reducer_.reduce_all();
}

void ShardedGradients::drop_incomplete() {
  for (const ReducedParameter& parameter : trained_) parameter.tensor.mutable_grad().reset();
  withheld_.release();
  forget();
}

int64_t ShardedGradients::bytes() const {
  int64_t bytes = reducer_.bytes();
  if (refuses_module_) return bytes;
  for (const ReducedParameter& parameter : trained_) bytes += bytes_of(parameter.tensor.grad());
  return bytes;
}

void WithheldGradients::withhold() {
  if (!before_.empty()) return;
  const Unwatched unwatched;
  for (const at::Tensor& shard : shards_) {
    // Not dense, so that nobody takes its memory without an operation.
    stand_ins_.push_back(memory_.tensor().expand(shard.sizes()));
    before_.push_back(std::exchange(shard.mutable_grad(), stand_ins_.back()));
  }
}

void WithheldGradients::release() {
  for (size_t i = 0; i < before_.size(); ++i) {
    if (shards_[i].grad().is_same(stand_ins_[i])) shards_[i].mutable_grad() = before_[i];
  }
  stand_ins_.clear();
  before_.clear();
}

void WithheldGradients::before_use(const std::vector<size_t>&) {
  throw UsageError(place_ + ": a gradient of a shard was used while gradients only add up",
                   "run the last forward and backward of a step outside of no_sync, then step");
}

}  // namespace lockstep::detail
