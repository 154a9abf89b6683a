// ProcessGroup::all_reduce_values: each rank gathers all ranks' numbers and reduces them itself.
// So one message carries any mixture of types, and none goes through another type.

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/comm/checks/call_signature.h"
#include "lockstep/comm/group_impl.h"
#include "lockstep/comm/process_group.h"

namespace lockstep {
namespace {

using Kind = NumberReference::Kind;

/// A number on the wire, and what the ranks must agree on.
struct Lane {
  uint64_t bits = 0;  ///< The number as it lies in memory, at the front.
  uint64_t type = 0;
  uint64_t op = 0;
};
static_assert(std::endian::native == std::endian::little, "numbers lie at the front of their bits");

std::string op_name(ReduceOp op) {
  return reduction_name(static_cast<int>(op));  // c10d numbers them in the same order.
}

bool is_bitwise(ReduceOp op) {
  return op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
}

std::string type_name(const NumberReference& number) {
  constexpr const char* kNames[]{"bool", "int", "uint", "float"};
  const std::string name = kNames[static_cast<size_t>(number.kind())];
  return number.kind() == Kind::boolean ? name : name + std::to_string(8 * number.bytes());
}

void check(const NumberReference& number, size_t index, ReduceOp op) {
  const auto refuse = [&](const std::string& remedy) {
    throw UsageError("all_reduce_values: argument " + std::to_string(index + 1) + " is a " +
                         type_name(number) + ", which has no " + op_name(op),
                     remedy);
  };
  if (op < ReduceOp::sum || op > ReduceOp::bxor) throw UsageError("an unknown reduction");
  const bool arithmetic = op == ReduceOp::sum || op == ReduceOp::avg || op == ReduceOp::product;
  if (number.kind() == Kind::boolean && arithmetic)
    refuse("take ReduceOp::max (any) or ReduceOp::min (all), or count in an int64_t");
  if (number.kind() != Kind::floating && op == ReduceOp::avg)
    refuse("reduce it as a double, or take the sum");
  if (number.kind() == Kind::floating && is_bitwise(op)) refuse("reduce whole numbers so");
}

Lane lane_of(const NumberReference& number, ReduceOp op) {
  Lane lane{.type = uint64_t{number.bytes()} << 8 | static_cast<uint64_t>(number.kind()),
            .op = static_cast<uint64_t>(op)};
  std::memcpy(&lane.bits, number.number(), number.bytes());
  return lane;
}

/// Wider than every type that there is: a sum that fits may pass the ends of its own on its way.
__extension__ using Whole = __int128;

Whole whole_of(uint64_t bits, const NumberReference& type) {
  if (type.kind() != Kind::signed_integer) return bits;
  const int unused = 64 - 8 * type.bytes();
  return static_cast<int64_t>(bits << unused) >> unused;
}

double floating_of(uint64_t bits, const NumberReference& type) {
  if (type.bytes() == sizeof(double)) return std::bit_cast<double>(bits);
  return std::bit_cast<float>(static_cast<uint32_t>(bits));
}

void combine_whole(ReduceOp op, Whole& result, Whole value) {
  switch (op) {
    case ReduceOp::sum:
      result += value;
      break;
    case ReduceOp::product:
      // It fits no type any more, unless a 0 comes.
      if (__builtin_mul_overflow(result, value, &result)) result = Whole{1} << 100;
      break;
    case ReduceOp::min:
      result = std::min(result, value);
      break;
    case ReduceOp::max:
      result = std::max(result, value);
      break;
    case ReduceOp::band:
      result &= value;
      break;
    case ReduceOp::bor:
      result |= value;
      break;
    case ReduceOp::bxor:
      result ^= value;
      break;
    case ReduceOp::avg:
      break;  // Of fractions only.
  }
}

/// A NaN of any rank wins, as in tensors.
void combine_floating(ReduceOp op, double& result, double value) {
  const bool takes = op == ReduceOp::min ? value < result : value > result;
  if (op == ReduceOp::product) {
    result *= value;
  } else if (op == ReduceOp::min || op == ReduceOp::max) {
    if (takes || value != value) result = result != result ? result : value;
  } else {
    result += value;
  }
}

/// All ranks' numbers, rank after rank.
std::vector<Lane> gather_lanes(const ProcessGroup& group, std::span<const NumberReference> numbers,
                               ReduceOp op) {
  std::vector<Lane> mine;
  for (const NumberReference& number : numbers) mine.push_back(lane_of(number, op));
  const auto bytes = static_cast<int64_t>(mine.size() * sizeof(Lane));
  const c10::Device device = impl_of(group).device();
  at::Tensor all = at::empty({group.size() * bytes}, at::dtype(at::kByte).device(device));
  group.all_gather_into_tensor(all, at::from_blob(mine.data(), {bytes}, at::kByte).to(device));
  all = all.cpu();
  std::vector<Lane> lanes(mine.size() * static_cast<size_t>(group.size()));
  std::memcpy(lanes.data(), all.const_data_ptr(), all.nbytes());
  return lanes;
}

/// Throws MismatchError unless all ranks gave such a number for the same reduction.
void check_alike(const ProcessGroup& group, const std::vector<Lane>& ranks) {
  const auto me = static_cast<size_t>(group.rank());
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const bool same_type = ranks[rank].type == ranks[me].type;
    if (same_type && ranks[rank].op == ranks[me].op) continue;
    const int mine = group.global_ranks()[me], theirs = group.global_ranks()[rank];
    throw MismatchError(
        "all_reduce_values: ranks " + std::to_string(mine) + " and " + std::to_string(theirs) +
            " gave " + (same_type ? "different reductions" : "numbers of different types"),
        "all ranks must give the same types in the same order, and the same reduction",
        mismatch_of({mine, theirs}));
  }
}

/// The bits of the result of the ranks' numbers.
uint64_t reduce_floating(const NumberReference& type, ReduceOp op, const std::vector<Lane>& ranks) {
  double result = floating_of(ranks[0].bits, type);
  for (size_t rank = 1; rank < ranks.size(); ++rank)
    combine_floating(op, result, floating_of(ranks[rank].bits, type));
  if (op == ReduceOp::avg) result /= static_cast<double>(ranks.size());
  if (type.bytes() == sizeof(double)) return std::bit_cast<uint64_t>(result);
  return std::bit_cast<uint32_t>(static_cast<float>(result));
}

uint64_t reduce_whole(const NumberReference& type, size_t index, ReduceOp op,
                      const std::vector<Lane>& ranks) {
  Whole result = whole_of(ranks[0].bits, type);
  for (size_t rank = 1; rank < ranks.size(); ++rank)
    combine_whole(op, result, whole_of(ranks[rank].bits, type));
  const auto bits = static_cast<uint64_t>(result);
  const uint64_t mask = ~uint64_t{0} >> (64 - 8 * type.bytes());
  if (whole_of(bits & mask, type) == result) return bits;
  throw NumericError("all_reduce_values: the " + op_name(op) + " of argument " +
                         std::to_string(index + 1) + " does not fit its type, " + type_name(type),
                     "take a wider type, such as int64_t");
}

}  // namespace

void ProcessGroup::all_reduce_numbers(std::span<const NumberReference> numbers, ReduceOp op) const {
  native();  // A null or closed group throws here.
  if (numbers.empty()) throw UsageError("all_reduce_numbers: no numbers");
  for (size_t i = 0; i < numbers.size(); ++i) check(numbers[i], i, op);
  const std::vector<Lane> all = gather_lanes(*this, numbers, op);
  std::vector<uint64_t> results;
  for (size_t i = 0; i < numbers.size(); ++i) {
    std::vector<Lane> ranks;
    for (size_t at = i; at < all.size(); at += numbers.size()) ranks.push_back(all[at]);
    check_alike(*this, ranks);
    results.push_back(numbers[i].kind() == Kind::floating ? reduce_floating(numbers[i], op, ranks)
                                                          : reduce_whole(numbers[i], i, op, ranks));
  }
  // None is changed when one of them fails.
  for (size_t i = 0; i < numbers.size(); ++i)
    std::memcpy(numbers[i].number(), &results[i], numbers[i].bytes());
}

}  // namespace lockstep
