#include "lockstep/parallel/fsdp/sharded_gradients.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "lockstep/autograd/backward_hook.h"
#include "lockstep/base/call_origin.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/parallel/scaled_copy.h"
#include "lockstep/parallel/whole_model.h"

namespace lockstep::detail {

ShardedGradients::ShardedGradients(ShardedParameters& parameters, std::vector<at::Tensor> pieces,
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
  track(tracked);
}

bool ShardedGradients::begin_round() {
  if (!synchronizing_) return false;
  for (Unit& unit : units_) unit.awaited = unit.trainable.size();
  if (!ordered_) arrivals_.clear();
  next_ = 0;
  complete_ = false;
  return true;
}

std::string ShardedGradients::place() const {
  return "FullyShardedDataParallel, rank " + std::to_string(parameters_.group().rank());
}

const FlatParameter& ShardedGradients::parameter(size_t index) const {
  return parameters_.units()[members_[index].unit].parameters[members_[index].parameter];
}

void ShardedGradients::on_backward(size_t) {
  refuse_distributed_autograd(place());
  parameters_.begin_backward();
  keeps_graph_ = keeps_graph();
  if (synchronizing_) withheld_.release();
  after_backward([this] { on_end(); });
}

void ShardedGradients::take(size_t index) {
  const size_t unit = members_[index].unit;
  if (--units_[unit].awaited > 0) return;
  if (!ordered_) arrivals_.push_back(unit);
  parameters_.release(unit);
  reduce_in_turn();
}

void ShardedGradients::refuse_second(size_t index, bool, const std::vector<size_t>&) {
  throw UsageError(place() + ": backward gave " + parameter(index).name + " its gradient twice",
                   "a module that is run again within backward (checkpointing) must not share "
                   "parameters with what runs outside of it, or run twice");
}

/// All but the last, which waits for the end: then nothing is left to compute meanwhile.
void ShardedGradients::reduce_in_turn() {
  const c10::AutoGradMode no_grad(false);
  for (; next_ + 1 < order_.size() && units_[order_[next_]].awaited == 0; ++next_)
    reduce(order_[next_], /*wait=*/false);
}

/// Backward has run all of its nodes.
void ShardedGradients::on_end() {
  if (!keeps_graph_) --expected_;
  if (!synchronizing_) {
    withheld_.withhold();
    return parameters_.end_round();
  }
  if (!complete_ && !find_unused_) return;
  const c10::AutoGradMode no_grad(false);
  for (; next_ < order_.size(); ++next_) reduce(order_[next_], /*wait=*/next_ + 1 == order_.size());
  for (Reduction& reduction : std::exchange(running_, {})) take_result(std::move(reduction));
  if (!ordered_) agree_on_order();
  forget();
  // No rank has finished the last reduction before all have begun it: nobody reads any more.
  parameters_.end_round(/*all_know=*/true);
  // Another backward would add to these.
  if (expected_ == 0 && !keeps_graph_ && !std::exchange(has_refused_, true)) refuse_module();
}

void ShardedGradients::refuse_module() {
  refuses_module_ = true;
  for (size_t i = 0; i < members_.size(); ++i) {
    const at::Tensor& tensor = parameter(i).tensor;
    tensor.mutable_grad() = parameters_.refused_gradient(tensor);
  }
}

void ShardedGradients::allow_module() {
  if (!std::exchange(refuses_module_, false)) return;
  for (size_t i = 0; i < members_.size(); ++i) parameter(i).tensor.mutable_grad().reset();
}

/// Rank 0's, so that all ranks reduce alike.
void ShardedGradients::agree_on_order() {
  ordered_ = true;
  // Where parameters may be unused, a rank does not know them all.
  if (!find_unused_ && parameters_.group().size() > 1 && order_.size() > 1)
    order_ = parameters_.group().broadcast_object(arrivals_, 0).get<std::vector<size_t>>();
  arrivals_ = {};
}

at::ScalarType ShardedGradients::reduce_dtype(size_t unit) const {
  return reduce_dtype_.value_or(parameters_.units()[unit].parameters.front().tensor.scalar_type());
}

at::Tensor ShardedGradients::staging_buffer(size_t unit) {
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

void ShardedGradients::stage(const Unit& unit, size_t index, const at::Tensor& staged) {
  const int size = parameters_.group().size();
  for (const size_t member : unit.trainable) {
    const FlatParameter& item = parameters_.units()[index].parameters[member];
    at::Tensor& gradient = item.tensor.mutable_grad();
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

void ShardedGradients::reduce(size_t index, bool wait) {
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
  at::Tensor result =
      direct ? unit.gradient : at::empty({parameters_.units()[index].shard_size}, staged.options());
  const CallOrigin origin("gradients", "FullyShardedDataParallel");
  Reduction reduction{index, staged, result, {}};
  if (wait) {
    parameters_.group().reduce_scatter_tensor(result, staged);
  } else {
    reduction.work = parameters_.group().reduce_scatter_tensor_async(result, staged);
  }
  running_.push_back(std::move(reduction));
}

void ShardedGradients::take_result(Reduction reduction) {
  if (reduction.work) reduction.work.wait();
  Unit& unit = units_[reduction.unit];
  for (const size_t index : unit.pieces) {
    const Piece& place = places_[index];
    at::Tensor& gradient = pieces_[index].mutable_grad();
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

/// The module's own zero_grad does not reach the shards' gradients, which then add up silently.
void ShardedGradients::tell_if_kept(size_t piece) {
  if (told_kept_ || pieces_[piece]._version() == versions_[piece]) return;
  told_kept_ = true;
  log_warning(place() +
              ": gradients add up to those of before the last step, which were not cleared. Call "
              "zero_grad() of this or of its optimizer; the module's own does not reach shards");
}

void ShardedGradients::follow_module() {
  refresh();
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

bool ShardedGradients::has_local() const {
  for (size_t i = 0; i < members_.size() && !refuses_module_; ++i) {
    if (parameter(i).tensor.grad().defined()) return true;
  }
  return false;
}

std::vector<std::string> ShardedGradients::missing_names() const {
  std::vector<std::string> names;
  for (const size_t index : missing()) names.push_back(parameter(index).name);
  return names;
}

void ShardedGradients::drop_incomplete() {
  for (size_t i = 0; i < members_.size(); ++i) parameter(i).tensor.mutable_grad().reset();
  withheld_.release();
  running_.clear();
  forget();
}

int64_t ShardedGradients::bytes() const {
  int64_t bytes = 0;
  for (const Unit& unit : units_) bytes += bytes_of(unit.gradient);
  for (size_t i = 0; i < members_.size() && !refuses_module_; ++i)
    bytes += bytes_of(parameter(i).tensor.grad());
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
