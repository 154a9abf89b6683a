#include "tests/fuzz/oracle.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <limits>
#include <utility>

namespace lockstep::fuzz {
namespace {

using Tensors = std::vector<at::Tensor>;

std::pair<int64_t, int64_t> range_of(const Step& step, int size) {
  if (step.dtype == at::kBool) return {0, 1};
  const bool product = reduces(step.kind) && step.reduction == ReduceOp::product;
  switch (step.dtype) {
    case at::kByte:
      return {0, 255};
    case at::kChar:
      return {-128, 127};
    case at::kShort:
      return {-32'768, 32'767};
    case at::kInt:  // Overflow is undefined in C++, so no rank provokes it.
      return product ? std::pair<int64_t, int64_t>{-3, 3}
                     : std::pair<int64_t, int64_t>{-(1 << 27), 1 << 27};
    case at::kLong:
      return product ? std::pair<int64_t, int64_t>{-3, 3}
                     : std::pair<int64_t, int64_t>{-(int64_t{1} << 58), int64_t{1} << 58};
    case at::kHalf:
    case at::kBFloat16:  // bfloat16 has whole numbers up to 256.
      return product ? std::pair<int64_t, int64_t>{-2, 2}
                     : std::pair<int64_t, int64_t>{-256 / size, 256 / size};
    default:
      return product ? std::pair<int64_t, int64_t>{-4, 4}
                     : std::pair<int64_t, int64_t>{-100'000, 100'000};
  }
}

at::Tensor combine(ReduceOp op, const at::Tensor& a, const at::Tensor& b) {
  const bool boolean = a.scalar_type() == at::kBool;
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
      return boolean ? a.logical_or(b) : a + b;
    case ReduceOp::product:
      return boolean ? a.logical_and(b) : a * b;
    case ReduceOp::min:
      return at::minimum(a, b);
    case ReduceOp::max:
      return at::maximum(a, b);
    case ReduceOp::band:
      return a.bitwise_and(b);
    case ReduceOp::bor:
      return a.bitwise_or(b);
    case ReduceOp::bxor:
      return a.bitwise_xor(b);
  }
  return {};
}

/// The parts of a complex number are divided by themselves, integers towards zero.
at::Tensor average(const at::Tensor& sum, int size) {
  if (at::isComplexType(sum.scalar_type()))
    return at::view_as_complex(at::view_as_real(sum) / size);
  if (at::isIntegralType(sum.scalar_type(), false))
    return at::div(sum, size, "trunc").to(sum.scalar_type());
  return sum / size;
}

at::Tensor reduced(const Step& step, const Tensors& all) {
  const bool half = step.dtype == at::kHalf || step.dtype == at::kBFloat16;
  at::Tensor result = half ? all[0].to(at::kFloat) : all[0];
  for (size_t i = 1; i < all.size(); ++i) result = combine(step.reduction, result, all[i]);
  if (step.reduction == ReduceOp::avg) result = average(result, static_cast<int>(all.size()));
  return result.to(step.dtype);
}

/// Rows from one rank to another in an all_to_all.
int64_t rows(const Step& step, Carrier carrier, int from, int to) {
  const bool even = step.kind == Kind::all_to_all_single
                        ? !step.splits
                        : carrier == Carrier::gloo;  // It asks for it.
  if (even) return 2 + step.extra;
  KeyedRandom random(step.key, static_cast<uint64_t>(from), static_cast<uint64_t>(to));
  return static_cast<int64_t>(random.below(4)) + step.extra;
}

/// Makes a rank's tensors, and those of all ranks.
class Maker {
 public:
  Maker(const Step& step, Carrier carrier, int rank, int size)
      : step_(step), carrier_(carrier), rank_(rank), size_(size) {}

  Expectation collective() const {
    switch (step_.kind) {
      case Kind::all_reduce:
      case Kind::all_reduce_coalesced:
      case Kind::symmetric:
        return all_reduce();
      case Kind::reduce:
        return {{mine()}, {is_root() ? sum(0, step_.shape) : at::Tensor()}, true};
      case Kind::broadcast:
        return {{mine()}, {of(step_.root)}, true};
      case Kind::all_gather:
        return {{mine()}, everyones()};
      case Kind::all_gather_into_tensor:
        return {{mine()}, {joined(everyones())}};
      case Kind::gather:
        return {{mine()}, is_root() ? everyones() : Tensors()};
      case Kind::scatter:
        return {is_root() ? for_each(rank_) : Tensors(), {of(step_.root, rank_)}};
      case Kind::reduce_scatter:
        return {for_each(rank_), {sum(rank_, step_.shape)}};
      case Kind::reduce_scatter_tensor:
        return {{joined(for_each(rank_))}, {sum(rank_, step_.shape)}};
      case Kind::all_to_all:
        return {given(), taken()};
      case Kind::all_to_all_single:
        return all_to_all_single();
      default:
        return {};
    }
  }

 private:
  bool is_root() const { return rank_ == step_.root; }
  at::Tensor of(int rank, int index, const std::vector<int64_t>& shape) const {
    return values_for(step_, carrier_, size_, rank, index, shape);
  }
  at::Tensor of(int rank, int index = 0) const { return of(rank, index, step_.shape); }
  at::Tensor mine() const { return of(rank_); }
  template <class Make>
  Tensors each(Make make) const {
    Tensors all;
    for (int other = 0; other < size_; ++other) all.push_back(make(other));
    return all;
  }
  Tensors everyones() const {
    return each([&](int other) { return of(other); });
  }
  Tensors for_each(int rank) const {
    return each([&](int other) { return of(rank, other); });
  }
  /// Gloo wants the parts' own number of dimensions.
  at::Tensor joined(const Tensors& parts) const {
    return carrier_ == Carrier::gloo ? at::cat(parts) : at::stack(parts);
  }
  at::Tensor sum(int index, const std::vector<int64_t>& shape) const {
    return reduced(step_, each([&](int other) { return of(other, index, shape); }));
  }

  Expectation all_reduce() const {
    Expectation result;
    result.in_place = true;
    for (int i = 0; i < step_.tensors; ++i) {
      std::vector<int64_t> shape = step_.shape;
      if (i > 0) shape.push_back(i);  // The tensors of a coalesced call differ in size.
      result.inputs.push_back(of(rank_, i, shape));
      result.outputs.push_back(sum(i, shape));
    }
    return result;
  }

  at::Tensor part(int from, int to) const {
    std::vector<int64_t> shape = step_.shape.empty() ? std::vector<int64_t>{1} : step_.shape;
    shape[0] = rows(step_, carrier_, from, to);
    return of(from, to, shape);
  }
  Tensors given() const {
    return each([&](int to) { return part(rank_, to); });
  }
  Tensors taken() const {
    return each([&](int from) { return part(from, rank_); });
  }
  Expectation all_to_all_single() const {
    Expectation result{{at::cat(given())}, {at::cat(taken())}};
    for (int other = 0; other < size_ && step_.splits; ++other) {
      result.input_splits.push_back(rows(step_, carrier_, rank_, other));
      result.output_splits.push_back(rows(step_, carrier_, other, rank_));
    }
    return result;
  }

  const Step& step_;
  const Carrier carrier_;
  const int rank_;
  const int size_;
};

}  // namespace

at::Tensor values_for(const Step& step, Carrier carrier, int size, int rank, int index,
                      const std::vector<int64_t>& shape) {
  KeyedRandom random(step.key, static_cast<uint64_t>(rank) + 1'000,
                     static_cast<uint64_t>(index) + 1'000);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(random.next());
  std::vector<int64_t> made = shape;
  const bool repeated = step.repeated && !shape.empty() && shape[0] > 0;
  if (repeated) made[0] = 1;
  const auto [low, high] = range_of(step, size);
  const auto draw = [&] {
    return at::randint(low, high + 1, made, generator, at::dtype(at::kLong));
  };
  at::Tensor values;
  if (at::isComplexType(step.dtype)) {
    const auto part = step.dtype == at::kComplexFloat ? at::kFloat : at::kDouble;
    const at::Tensor real = draw().to(part);
    values = at::complex(real, draw().to(part));
  } else {
    values = draw().to(step.dtype);
  }
  // Largest and smallest hand a NaN on; over MPI they are what MPI makes of them.
  const bool ordered = step.reduction == ReduceOp::min || step.reduction == ReduceOp::max;
  if (reduces(step.kind) && ordered && carrier != Carrier::mpi && carrier != Carrier::gloo &&
      at::isFloatingType(step.dtype) && values.numel() > 0 && random.below(3) == 0)
    values.view(-1)[0] = std::numeric_limits<float>::quiet_NaN();
  return repeated ? values.expand(shape) : values;
}

Expectation expect(const Step& step, Carrier carrier, int rank, int size) {
  return Maker(step, carrier, rank, size).collective();
}

std::vector<Message> messages_of(const Step& step, int size) {
  KeyedRandom random(step.key, 7, 7);
  std::vector<Message> messages;
  const auto add = [&](int from, int to, const std::vector<int64_t>& shape) {
    const int index = static_cast<int>(messages.size());
    messages.push_back(
        {from, to, step.tag, values_for(step, Carrier::shm, size, from, index, shape)});
  };
  const auto with_extra = [&](std::vector<int64_t> shape) {
    return step.extra ? std::vector<int64_t>{c10::multiply_integers(shape) + step.extra} : shape;
  };
  if (step.kind == Kind::collect_any) {
    for (int from = 0; from < size; ++from)
      if (from != step.root) add(from, step.root, with_extra(step.shape));
    return messages;
  }
  const auto ranks = static_cast<uint64_t>(size);
  const auto count = size < 2 ? 0 : 1 + random.below(3 * ranks);
  for (uint64_t i = 0; i < count; ++i) {
    const int from = static_cast<int>(random.below(ranks));
    const int to =
        static_cast<int>((static_cast<uint64_t>(from) + 1 + random.below(ranks - 1)) % ranks);
    std::vector<int64_t> shape = step.shape;
    // Small and large ones take different ways.
    if (random.below(2) == 0) shape = {static_cast<int64_t>(random.below(20))};
    add(from, to, with_extra(shape));
  }
  return messages;
}

}  // namespace lockstep::fuzz
