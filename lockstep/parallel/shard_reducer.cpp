#include "lockstep/parallel/shard_reducer.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/parallel/scaled_copy.h"

namespace lockstep::detail {
namespace {

/// One is filled while another is reduced.
constexpr size_t kUnderWay = 2;
/// Chunks begin at a cache line, whatever the dtype.
constexpr int64_t kLine = 64;

void fill_zeros(const at::Tensor& vector, int64_t begin, int64_t count) {
  if (count == 0) return;
  if (!vector.is_cpu()) {
    vector.narrow(0, begin, count).zero_();
    return;
  }
  const size_t item = vector.itemsize();
  std::memset(static_cast<char*>(vector.mutable_data_ptr()) + static_cast<size_t>(begin) * item, 0,
              static_cast<size_t>(count) * item);
}

}  // namespace

ShardReducer::ShardReducer(const std::vector<FlatUnit>& units,
                           const std::vector<ReducedParameter>& parameters,
                           const std::vector<at::Tensor>& parts, const ProcessGroup& group,
                           ShardReducerOptions options)
    : GradientReducer(group, options.caller,
                      group.size() * (options.replicate ? options.replicate.size() : 1)),
      options_(std::move(options)) {
  learns_order_ = !options_.fixed_order;
  std::unordered_map<const c10::TensorImpl*, size_t> index_of;
  for (const ReducedParameter& parameter : parameters)
    index_of.emplace(parameter.tensor.unsafeGetTensorImpl(), index_of.size());
  std::vector<size_t> unit_of(parameters.size()), order;
  for (const FlatUnit& flat : units) {
    Unit unit{.shard_size = flat.shard_size()};
    for (const FlatParameter& member : flat.parameters) {
      const auto found = index_of.find(member.tensor.unsafeGetTensorImpl());
      if (found == index_of.end()) continue;
      unit_of[found->second] = units_.size();
      unit.members.push_back(member);
      unit.members.back().name = parameters[found->second].name;
    }
    if (!unit.members.empty()) order.insert(order.begin(), units_.size());
    const c10::Device device = flat.parameters.front().tensor.device();
    unit.options = at::TensorOptions(options_.device.value_or(device)).dtype(flat.dtype);
    units_.push_back(std::move(unit));
  }
  set_units(std::move(unit_of), std::move(order));
  for (const Piece& piece : pieces_of(units, group_.rank())) {
    const FlatParameter& parameter = units[piece.unit].parameters[piece.parameter];
    if (!index_of.contains(parameter.tensor.unsafeGetTensorImpl())) continue;
    units_[piece.unit].parts.push_back(parts_.size());
    parts_.push_back({parts.at(parameter.index), piece.unit, piece.shard_offset});
  }
}

void ShardReducer::deliver() {
  receive(0);
  for (UpdatedPart& part : parts_) {
    if (units_[part.unit].adds) {
      tell_if_kept(part);
    } else {
      part.version = part.tensor._version();
    }
    part.tensor.mutable_grad() = part.cut;
  }
  has_means_ = true;
  if (std::exchange(learns_order_, false) && order_.size() > 1) learn_order();
}

/// A unit is complete with the last of its gradients.
void ShardReducer::learn_order() {
  const std::vector<size_t> arrivals = agreed_arrivals(options_.replicate);
  std::vector<size_t> order;
  for (auto index = arrivals.rbegin(); index != arrivals.rend(); ++index) {
    const size_t unit = unit_of_[*index];
    if (!std::ranges::count(order, unit)) order.push_back(unit);
  }
  order_.assign(order.rbegin(), order.rend());
}

void ShardReducer::reduce(size_t index, bool wait) {
  const c10::AutoGradMode no_grad(false);
  const at::AutoDispatchBelowADInplaceOrView untracked;
  Unit& unit = units_[index];
  ++reductions_;
  if (buffers_.empty()) make_buffers();
  adopt_gradients(unit);
  std::vector<at::Tensor> gradients;
  for (const auto& member : unit.members) gradients.push_back(ordered_gradient(member));
  const int64_t ranks = group_.size(), most = chunk_of(unit);
  for (int64_t begin = 0; begin < unit.shard_size; begin += most) {
    const int64_t count = std::min(most, unit.shard_size - begin);
    receive(buffers_.size() - 1);
    const at::Tensor staged =
        buffers_[turn_++ % buffers_.size()].view(dtype_of(unit)).narrow(0, 0, ranks * count);
    for (int64_t rank = 0; rank < ranks; ++rank)
      pack(unit, gradients, rank * unit.shard_size + begin, staged.narrow(0, rank * count, count));
    const at::Tensor target = unit.mean.narrow(0, begin, count);
    const bool direct =
        !unit.adds && staged.dtype() == target.dtype() && staged.device() == target.device();
    Chunk chunk{staged, direct ? target : at::empty({count}, staged.options()), target, unit.adds};
    Work work;
    if (wait) {
      group_.reduce_scatter_tensor(chunk.result, staged);
    } else {
      work = group_.reduce_scatter_tensor_async(chunk.result, staged);
    }
    under_way_.push_back(std::move(work));
    chunks_.push_back(std::move(chunk));
  }
  for (const auto& member : unit.members) member.tensor.mutable_grad().reset();
}

/// Where a part has a gradient, the unit's means add up. One that its owner has put there is
/// copied.
void ShardReducer::adopt_gradients(Unit& unit) {
  const bool made = unit.mean.defined();
  if (!made) unit.mean = at::empty({unit.shard_size}, unit.options);
  unit.adds = std::ranges::any_of(unit.parts,
                                  [this](size_t i) { return parts_[i].tensor.grad().defined(); });
  for (const size_t i : unit.parts) {
    auto& [part, _, offset, cut, version] = parts_[i];
    if (!made) cut = unit.mean.as_strided(part.sizes(), part.strides(), offset);
    if (!unit.adds || part.grad().is_same(cut)) continue;
    part.grad().defined() ? cut.copy_(part.grad()) : cut.zero_();
  }
}

/// As a vector in the order of the parameter's memory. Undefined: there is none.
at::Tensor ShardReducer::ordered_gradient(const FlatParameter& member) const {
  const at::Tensor& gradient = member.tensor.grad();
  if (!gradient.defined()) return {};
  if (gradient.layout() != at::kStrided)
    throw UsageError(options_.what + ": the gradient of " + member.name +
                         " is sparse, and cannot be cut into parts",
                     "make it dense (sparse=false of an embedding), or use the strategy ddp");
  return elements_like(gradient, member.tensor);
}

/// The unit's elements from `begin` on, divided.
void ShardReducer::pack(const Unit& unit, const std::vector<at::Tensor>& gradients, int64_t begin,
                        const at::Tensor& target) const {
  const auto& members = unit.members;
  const int64_t end = begin + target.numel();
  const auto after = std::upper_bound(
      members.begin(), members.end(), begin,
      [](int64_t element, const FlatParameter& member) { return element < member.offset; });
  int64_t at = begin;
  for (auto k = static_cast<size_t>(std::max<std::ptrdiff_t>(after - members.begin(), 1)) - 1;
       k < members.size() && members[k].offset < end; ++k) {
    if (!gradients[k].defined()) continue;
    const int64_t from = std::max(begin, members[k].offset);
    const int64_t to = std::min(end, members[k].offset + gradients[k].numel());
    if (from >= to) continue;
    fill_zeros(target, at - begin, from - at);
    const int64_t first = from - members[k].offset;
    if (gradients[k].scalar_type() == target.scalar_type()) {
      scaled_copy(target, from - begin, gradients[k], first, to - from, 1.0 / divisor_);
    } else {
      target.narrow(0, from - begin, to - from)
          .copy_(gradients[k].narrow(0, first, to - from))
          .div_(divisor_);  // As Python's hooks, which cast first.
    }
    at = to;
  }
  fill_zeros(target, at - begin, end - at);
}

at::ScalarType ShardReducer::dtype_of(const Unit& unit) const {
  return options_.dtype.value_or(unit.members.front().tensor.scalar_type());
}

/// Elements of each rank's shard.
int64_t ShardReducer::chunk_of(const Unit& unit) const {
  const auto item = static_cast<int64_t>(c10::elementSize(dtype_of(unit)));
  const int64_t elements = options_.chunk_bytes / item / group_.size() / kLine * kLine;
  return std::clamp(elements, std::min(kLine, unit.shard_size), unit.shard_size);
}

void ShardReducer::make_buffers() {
  int64_t bytes = 0;
  size_t chunks = 0;
  for (const size_t u : order_) {
    const auto item = static_cast<int64_t>(c10::elementSize(dtype_of(units_[u])));
    bytes = std::max(bytes, chunk_of(units_[u]) * group_.size() * item);
    chunks +=
        static_cast<size_t>((units_[u].shard_size + chunk_of(units_[u]) - 1) / chunk_of(units_[u]));
  }
  bytes = (bytes + kLine - 1) / kLine * kLine;
  const c10::Device device = units_[order_.front()].members.front().tensor.device();
  while (buffers_.size() < std::min(kUnderWay, chunks))
    buffers_.push_back(device.is_cpu()
                           ? group_.symmetric_empty(bytes, at::kByte)
                           : at::empty({bytes}, at::TensorOptions(device).dtype(at::kByte)));
}

/// Waits for the oldest, until at most so many are under way.
void ShardReducer::receive(size_t most_under_way) {
  const c10::AutoGradMode no_grad(false);
  while (under_way_.size() > most_under_way) {
    wait_for_oldest();
    Chunk chunk = std::move(chunks_.front());
    chunks_.pop_front();
    if (options_.replicate) options_.replicate.all_reduce(chunk.result);
    if (chunk.target.is_same(chunk.result)) continue;
    if (chunk.adds) {
      chunk.target.add_(chunk.result.to(chunk.target.options()));
    } else {
      chunk.target.copy_(chunk.result);
    }
  }
}

/// The module's own zero_grad does not reach the parts' gradients, which then add up silently.
void ShardReducer::tell_if_kept(const UpdatedPart& part) {
  if (told_kept_ || part.tensor._version() == part.version) return;
  told_kept_ = true;
  log_warning(
      options_.what +
      ": gradients add up to those of before the last step, which were not cleared. Call "
      "zero_grad() of the strategy, the wrapper or its optimizer; the module's own does not "
      "reach shards");
}

std::vector<at::Tensor> ShardReducer::means() const {
  std::vector<at::Tensor> means;
  for (const Unit& unit : units_) {
    if (has_means_ && unit.mean.defined()) means.push_back(unit.mean);
  }
  return means;
}

void ShardReducer::drop() {
  has_means_ = false;
  for (const UpdatedPart& part : parts_) part.tensor.mutable_grad().reset();
}

int64_t ShardReducer::bytes() const {
  int64_t bytes = 0;
  for (const Unit& unit : units_) {
    if (unit.mean.defined()) bytes += static_cast<int64_t>(unit.mean.nbytes());
  }
  return bytes;
}

}  // namespace lockstep::detail
