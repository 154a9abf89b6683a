#include "lockstep/parallel/fsdp/sharded_parameters.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/call_origin.h"
#include "lockstep/base/error.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/parallel/module_state.h"

namespace lockstep::detail {
namespace {

/// In the last element of a unit, which no parameter has, stands the unit's number. It has the same
/// value in every floating-point dtype.
double marker_of(size_t unit) {
  return static_cast<double>(unit % 125 + 1);
}

/// Without a look at the memory, which may not be there.
bool same_storage(const at::Tensor& a, const at::Tensor& b) {
  const auto impl_of = [](const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  };
  return impl_of(a) == impl_of(b);
}

}  // namespace

ShardedParameters::ShardedParameters(std::vector<FlatUnit> units, const ProcessGroup& group,
                                     const FsdpOptions& options, c10::Device device)
    : units_(std::move(units)),
      pieces_(pieces_of(units_, group.rank())),
      group_(group),
      device_(device),
      options_(options) {
  if (options_.share_memory && !options_.parameter_dtype && device_.is_cpu()) share_memory();
  make_shards();
}

at::ScalarType ShardedParameters::whole_dtype(size_t unit) const {
  const at::ScalarType own = units_[unit].dtype;
  return at::isFloatingType(own) ? options_.parameter_dtype.value_or(own) : own;
}

int64_t ShardedParameters::whole_bytes(size_t unit) const {
  const auto item = static_cast<int64_t>(c10::elementSize(whole_dtype(unit)));
  return (units_[unit].length() * item + 63) / 64 * 64;
}

/// A group of one has no need of a memory in common: its shards are the whole.
void ShardedParameters::share_memory() {
  int64_t bytes = 0;
  for (size_t u = 0; u < units_.size(); ++u) bytes += whole_bytes(u);
  const at::Tensor memory =
      group_.size() == 1 ? at::zeros({bytes}, at::kByte) : common_empty(group_, bytes, at::kByte);
  if (!memory.defined()) return;
  shared_ = true;
  int64_t begin = 0;
  for (size_t u = 0; u < units_.size(); ++u) {
    common_.push_back(memory.narrow(0, begin, whole_bytes(u))
                          .view(units_[u].dtype)
                          .narrow(0, 0, units_[u].length()));
    begin += whole_bytes(u);
  }
}

void ShardedParameters::make_shards() {
  const c10::AutoGradMode no_grad(false);
  const auto options = at::TensorOptions().device(options_.cpu_offload ? c10::kCPU : device_);
  const int rank = group_.rank(), size = group_.size();
  for (size_t u = 0; u < units_.size(); ++u) {
    const int64_t elements = units_[u].shard_size();
    shards_.push_back(shared_ ? common_[u].narrow(0, rank * elements, elements)
                              : at::zeros({elements}, options.dtype(units_[u].dtype)));
  }
  for (const FlatUnit& unit : units_) {
    for (const FlatParameter& parameter : unit.parameters) {
      if (!is_deferred(parameter.tensor)) set_values(parameter.tensor, parameter.tensor.detach());
    }
  }
  if (rank != size - 1) return;
  for (size_t u = 0; u < units_.size(); ++u) shards_[u].narrow(0, -1, 1).fill_(marker_of(u));
}

void ShardedParameters::set_values(const at::Tensor& parameter, const at::Tensor& values) {
  const c10::AutoGradMode no_grad(false);
  at::Tensor ordered;
  for (const Piece& piece : pieces_) {
    const FlatParameter& member = units_[piece.unit].parameters[piece.parameter];
    if (!member.tensor.is_same(parameter)) continue;
    if (!ordered.defined()) ordered = elements_like(values, parameter);
    shards_[piece.unit]
        .narrow(0, piece.shard_offset, piece.size)
        .copy_(ordered.narrow(0, piece.begin, piece.size));
  }
}

void ShardedParameters::adopt_module() {
  const c10::AutoGradMode no_grad(false);
  const Unwatched unwatched;
  state_.reserve(units_.size());
  for (size_t u = 0; u < units_.size(); ++u) {
    const FlatUnit& unit = units_[u];
    state_.push_back({WatchedMemory(*this, u, unit.length(), whole_dtype(u), device_,
                                    whole_dtype(u) != unit.dtype)});
    WatchedMemory& memory = state_.back().memory;
    for (const FlatParameter& parameter : unit.parameters) {
      at::Tensor tensor = parameter.tensor;
      const at::Tensor view =
          state_.back().views.emplace_back(view_like(memory.tensor(), parameter.offset, tensor));
      // set_data refuses to change the kind of device.
      if (is_deferred(tensor)) {
        tensor.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
      } else {
        tensor.set_data(view);
      }
    }
  }
  if (group_.size() == 1) open_common();
}

/// Between rounds other ranks write to the memory: a raw pointer into it would read a mixture of
/// two steps. Operations begin a round.
void ShardedParameters::open_common() {
  for (size_t u = 0; u < units_.size() && shared_; ++u) state_[u].memory.put(common_[u]);
}

void ShardedParameters::take_values() {
  std::vector<std::pair<size_t, size_t>> moved;  // Units and places in them.
  std::vector<size_t> indices;
  for (size_t u = 0; u < units_.size(); ++u) {
    for (size_t i = 0; i < units_[u].parameters.size(); ++i) {
      const FlatParameter& parameter = units_[u].parameters[i];
      if (same_storage(parameter.tensor, state_[u].memory.tensor())) continue;
      // It may have the dtype in which units are gathered.
      const at::Tensor& view = state_[u].views[i];
      const bool gathered = parameter.tensor.dtype() == view.dtype();
      expect_kind("FullyShardedDataParallel, rank " + std::to_string(group_.rank()), parameter.name,
                  parameter.tensor, gathered ? view.scalar_type() : units_[u].dtype, view.sizes());
      moved.emplace_back(u, i);
      indices.push_back(parameter.index);
    }
  }
  if (moved.empty()) return;
  end_round();
  check_same_on_all(indices, group_, "FullyShardedDataParallel");
  const c10::AutoGradMode no_grad(false);
  const Unwatched unwatched;
  for (const auto& [u, i] : moved) {
    at::Tensor tensor = units_[u].parameters[i].tensor;
    const at::Tensor values = tensor.detach();
    tensor.set_data(state_[u].views[i]);
    set_values(tensor, values);
  }
}

bool ShardedParameters::all_frozen() const {
  for (const FlatUnit& unit : units_) {
    for (const FlatParameter& parameter : unit.parameters) {
      if (parameter.tensor.requires_grad()) return false;
    }
  }
  return true;
}

void ShardedParameters::begin_round() {
  if (in_round_) return;
  if (group_.size() > 1) {
    if (shared_) group_.barrier();
    open_common();
  }
  in_round_ = true;
  in_backward_ = false;
  order_.begin();
}

void ShardedParameters::end_round(bool all_know) {
  if (!in_round_ || full_) return;
  in_round_ = false;
  current_.reset();
  previous_.reset();
  if (shared_) {
    if (group_.size() == 1) return;
    for (Unit& unit : state_) unit.memory.take();
    if (!all_know) group_.barrier();
    return;
  }
  for (size_t u = 0; u < units_.size(); ++u) {
    if (state_[u].work) finish_gather(u);
    free_unit(u);
  }
}

at::Tensor ShardedParameters::refused_gradient(const at::Tensor& parameter) const {
  const Unwatched unwatched;
  return refused_.tensor().expand(parameter.sizes());
}

void ShardedParameters::expect_no_gradient(const std::vector<size_t>& memories) const {
  if (std::ranges::find(memories, kRefused) == memories.end()) return;
  throw UsageError("FullyShardedDataParallel, rank " + std::to_string(group_.rank()) +
                       ": a gradient of one of the module's own parameters was used, but gradients "
                       "lie in shards",
                   "give the optimizer and zero_grad the shards, fsdp.parameters(), in place of "
                   "model->parameters(); clip by fsdp.clip_grad_norm");
}

void ShardedParameters::before_use(const std::vector<size_t>& memories) {
  expect_no_gradient(memories);
  if (in_round_ && (shared_ || (memories.size() == 1 && current_ == memories.front()))) return;
  const c10::AutoGradMode no_grad(false);
  if (!in_round_) {
    begin_round();
    lone_use_ = true;
  }
  if (shared_) return;
  in_use_ = memories;
  try {
    for (const size_t unit : memories) make_whole(unit);
    for (const size_t unit : memories) note_switch(unit);
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
}

void ShardedParameters::rethrow_failure() {
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void ShardedParameters::after_use() noexcept {
  in_use_.clear();
  if (!std::exchange(lone_use_, false)) return;
  try {
    end_round();
  } catch (...) {
    // The group has failed. Its next call says so.
  }
}

void ShardedParameters::before_write(size_t memory, const std::string& operation) {
  expect_no_gradient({memory});
  if (writable_) return;
  throw UsageError("FullyShardedDataParallel, rank " + std::to_string(group_.rank()) + ": " +
                       operation + " writes to parameters of '" + units_[memory].name +
                       "', which each rank has a shard of only",
                   "give the optimizer the shards (FullyShardedDataParallel::parameters()); write "
                   "values under full_parameters()");
}

void ShardedParameters::note_switch(size_t unit) {
  if (current_ == unit) return;
  previous_ = std::exchange(current_, unit);
  const auto next = order_.use(unit);
  const bool keeps = full_ || (!options_.reshard_after_forward && !in_backward_);
  for (size_t u = 0; u < units_.size() && !keeps; ++u) {
    const bool needed = u == unit || u == previous_ || u == next ||
                        std::find(in_use_.begin(), in_use_.end(), u) != in_use_.end();
    if (!needed) free_unit(u);
  }
  if (!options_.prefetch || !next || is_whole(*next) || state_[*next].work) return;
  start_gather(*next);
  ++foretold_;
}

void ShardedParameters::release(size_t unit) {
  if (shared_ || full_ || !is_whole(unit)) return;
  if (current_ == unit) current_.reset();
  if (previous_ == unit) previous_.reset();
  free_unit(unit);
}

void ShardedParameters::start_gather(size_t unit) {
  ++gathers_;
  const at::ScalarType dtype = whole_dtype(unit);
  const int64_t elements = units_[unit].length();
  const int64_t bytes = whole_bytes(unit);
  at::Tensor memory;
  for (size_t i = 0; i < free_buffers_.size() && !memory.defined(); ++i) {
    if (free_buffers_[i].numel() < bytes) continue;
    memory = std::move(free_buffers_[i]);
    free_buffers_.erase(free_buffers_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  if (!memory.defined()) {
    // Those that are too small would never be used again.
    free_buffers_.clear();
    memory = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
  }
  at::Tensor whole = memory.view(dtype).narrow(0, 0, elements);
  state_[unit].buffer = memory;
  const CallOrigin origin("parameters", "FullyShardedDataParallel");
  state_[unit].work = group_.all_gather_into_tensor_async(whole, shards_[unit].to(device_, dtype));
}

void ShardedParameters::finish_gather(size_t unit) {
  Unit& state = state_[unit];
  std::exchange(state.work, {}).wait();
  const int64_t elements = units_[unit].length();
  const at::Tensor whole = state.buffer.view(whole_dtype(unit)).narrow(0, 0, elements);
  check_marker(unit, whole);
  state.memory.put(whole);
}

/// Units of one size look alike to the group. Ranks that use them in different orders would get
/// each other's parameters.
void ShardedParameters::check_marker(size_t unit, const at::Tensor& whole) const {
  if (!device_.is_cpu()) return;  // It would have to be waited for.
  const double marker = whole.narrow(0, -1, 1).item<double>();
  if (marker == marker_of(unit)) return;
  throw MismatchError(
      "FullyShardedDataParallel: rank " + std::to_string(group_.rank()) +
          " uses the parameters of '" + units_[unit].name + "' while rank " +
          std::to_string(group_.size() - 1) + " uses those of another module",
      "ranks must use the same modules in the same order; a module that only some ranks need must "
      "run on all of them");
}

void ShardedParameters::make_whole(size_t unit) {
  if (is_whole(unit)) return;
  if (!state_[unit].work) start_gather(unit);
  finish_gather(unit);
}

void ShardedParameters::free_unit(size_t unit) {
  if (!is_whole(unit)) return;
  constexpr size_t kKept = 3;  ///< As many as are whole at a time when units are freed in forward.
  state_[unit].memory.take();
  at::Tensor buffer = std::exchange(state_[unit].buffer, {});
  if (free_buffers_.size() < kKept) free_buffers_.push_back(std::move(buffer));
}

void ShardedParameters::begin_full(bool writable) {
  if (full_) {
    throw UsageError("FullyShardedDataParallel: full_parameters() within full_parameters()",
                     "let go of the first guard");
  }
  if (writable && options_.parameter_dtype) {
    throw UsageError(
        "FullyShardedDataParallel: with parameter_dtype the module's values are rounded ones, and "
        "writing them back would round the shards",
        "write to the shards (parameters()), or load a state");
  }
  const c10::AutoGradMode no_grad(false);
  begin_round();
  full_ = true;
  writable_ = writable;
  for (size_t u = 0; u < units_.size(); ++u) {
    if (!shared_) {
      make_whole(u);
    } else if (writable) {
      // What all ranks write must not be written to the common memory several times.
      state_[u].buffer = common_[u].clone();
      state_[u].memory.put(state_[u].buffer);
    }
  }
}

void ShardedParameters::end_full() {
  if (!full_) return;
  const c10::AutoGradMode no_grad(false);
  const bool writes = std::exchange(writable_, false);
  full_ = false;
  const int rank = group_.rank();
  for (size_t u = 0; u < units_.size() && writes; ++u) {
    const at::Tensor whole = state_[u].buffer.view(whole_dtype(u));
    shards_[u].copy_(whole.narrow(0, rank * units_[u].shard_size(), units_[u].shard_size()));
    if (!shared_) continue;
    state_[u].memory.put(common_[u]);
    state_[u].buffer.reset();
  }
  end_round();
  free_buffers_.clear();
}

}  // namespace lockstep::detail
