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

/// A number on the wire: as it lies in memory, at the front of 16 bytes, which hold a long double.
constexpr int64_t kLane = 16;

std::string op_name(ReduceOp op) {
  return reduction_name(static_cast<int>(op));  // c10d numbers them in the same order.
}

bool is_bitwise(ReduceOp op) {
  return op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
}

std::string type_name(Kind kind, int bytes) {
  switch (kind) {
    case Kind::boolean:
      return "bool";
    case Kind::signed_integer:
      return "int" + std::to_string(8 * bytes);
    case Kind::unsigned_integer:
      return "uint" + std::to_string(8 * bytes);
    case Kind::floating:
      return bytes == sizeof(float) ? "float" : bytes == sizeof(double) ? "double" : "long double";
  }
  return "?";
}

void check(const NumberReference& number, size_t index, ReduceOp op) {
  const auto refuse = [&](const std::string& remedy) {
    throw UsageError("all_reduce_values: argument " + std::to_string(index + 1) + " is a " +
                         type_name(number.kind(), number.bytes()) + ", which has no " + op_name(op),
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

/// What the ranks must agree on, for the first lane.
struct Header {
  uint64_t types = 14695981039346656037ULL;  ///< FNV-1a of all kinds and sizes.
  uint64_t op = 0;

  Header(std::span<const NumberReference> numbers, ReduceOp reduction)
      : op(static_cast<uint64_t>(reduction)) {
    for (const NumberReference& number : numbers) {
      for (const uint64_t byte : {uint64_t{number.bytes()}, static_cast<uint64_t>(number.kind())})
        types = (types ^ byte) * 1099511628211ULL;
    }
  }
};

/// Wider than every type that there is: a sum that fits may pass the ends of its own on its way.
__extension__ using Whole = __int128;
static_assert(std::endian::native == std::endian::little, "numbers lie at the front of a lane");

Whole load_whole(const std::byte* from, const NumberReference& type) {
  uint64_t raw = 0;
  std::memcpy(&raw, from, type.bytes());
  if (type.kind() != Kind::signed_integer) return raw;
  const int unused = 64 - 8 * type.bytes();
  return static_cast<int64_t>(raw << unused) >> unused;
}

/// False when the result does not fit.
bool combine_whole(ReduceOp op, Whole& result, Whole value) {
  switch (op) {
    case ReduceOp::sum:
      return !__builtin_add_overflow(result, value, &result);
    case ReduceOp::product:
      return !__builtin_mul_overflow(result, value, &result);
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
  return true;
}

/// A NaN of any rank wins, as in tensors.
template <class T>
void combine_floating(ReduceOp op, T& result, T value) {
  const bool takes = op == ReduceOp::min ? value < result : value > result;
  if (op == ReduceOp::product) {
    result *= value;
  } else if (op == ReduceOp::min || op == ReduceOp::max) {
    if (takes || value != value) result = result != result ? result : value;
  } else {
    result += value;
  }
}

/// All ranks' numbers: a header's lane and one for each number, rank after rank.
class Gathered {
 public:
  Gathered(const ProcessGroup& group, std::span<const NumberReference> numbers, ReduceOp op)
      : op_(op), lanes_(static_cast<int64_t>(numbers.size()) + 1), ranks_(group.size()) {
    const Header header(numbers, op);
    static_assert(sizeof(Header) == kLane && sizeof(long double) <= kLane);
    at::Tensor mine = at::zeros({lanes_ * kLane}, at::kByte);
    auto* bytes = static_cast<std::byte*>(mine.mutable_data_ptr());
    std::memcpy(bytes, &header, sizeof(header));
    for (size_t i = 0; i < numbers.size(); ++i) {
      std::memcpy(bytes + static_cast<int64_t>(i + 1) * kLane, numbers[i].number(),
                  numbers[i].bytes());
    }
    const c10::Device device = impl_of(group).device();
    at::Tensor all = at::empty({ranks_ * lanes_ * kLane}, at::dtype(at::kByte).device(device));
    group.all_gather_into_tensor(all, mine.to(device));
    all_ = all.cpu();
    check_headers(group, header);
  }

  /// Writes the result of `number`, the one at `index`, into its place among rank 0's.
  void reduce(const NumberReference& number, size_t index) {
    if (number.kind() != Kind::floating) return reduce_whole(number, index);
    if (number.bytes() == sizeof(float)) return reduce_floating<float, double>(index);
    if (number.bytes() == sizeof(double)) return reduce_floating<double, double>(index);
    reduce_floating<long double, long double>(index);
  }
  /// Hands a result over.
  void take(const NumberReference& number, size_t index) const {
    std::memcpy(number.number(), lane(0, index + 1), number.bytes());
  }

 private:
  std::byte* lane(int rank, size_t index) const {
    return static_cast<std::byte*>(all_.mutable_data_ptr()) +
           (rank * lanes_ + static_cast<int64_t>(index)) * kLane;
  }

  void check_headers(const ProcessGroup& group, const Header& mine) const {
    for (int rank = 0; rank < ranks_; ++rank) {
      Header theirs = mine;
      std::memcpy(&theirs, lane(rank, 0), sizeof(theirs));
      if (theirs.types == mine.types && theirs.op == mine.op) continue;
      const auto& names = group.global_ranks();
      throw MismatchError(
          "all_reduce_values: ranks " + std::to_string(names[static_cast<size_t>(group.rank())]) +
              " and " + std::to_string(names[static_cast<size_t>(rank)]) + " gave " +
              (theirs.types != mine.types ? "numbers of different types" : "different reductions"),
          "all ranks must give the same types in the same order, and the same reduction",
          mismatch_of(
              {names[static_cast<size_t>(group.rank())], names[static_cast<size_t>(rank)]}));
    }
  }

  template <class T, class Wide>
  void reduce_floating(size_t index) {
    const auto value = [&](int rank) -> Wide {
      T number{};
      std::memcpy(&number, lane(rank, index + 1), sizeof(T));
      return number;
    };
    Wide result = value(0);
    for (int rank = 1; rank < ranks_; ++rank) combine_floating<Wide>(op_, result, value(rank));
    if (op_ == ReduceOp::avg) result /= static_cast<Wide>(ranks_);
    const T rounded = static_cast<T>(result);
    std::memcpy(lane(0, index + 1), &rounded, sizeof(T));
  }

  void reduce_whole(const NumberReference& number, size_t index) {
    Whole result = load_whole(lane(0, index + 1), number);
    bool fits = true;
    for (int rank = 1; rank < ranks_; ++rank)
      fits = combine_whole(op_, result, load_whole(lane(rank, index + 1), number)) && fits;
    std::memcpy(lane(0, index + 1), &result, sizeof(result));
    if (fits && load_whole(lane(0, index + 1), number) == result) return;
    throw NumericError("all_reduce_values: the " + op_name(op_) + " of argument " +
                           std::to_string(index + 1) + " does not fit its type, " +
                           type_name(number.kind(), number.bytes()),
                       "take a wider type, such as int64_t");
  }

  const ReduceOp op_;
  const int64_t lanes_;
  const int ranks_;
  at::Tensor all_;
};

}  // namespace

void ProcessGroup::all_reduce_numbers(std::span<const NumberReference> numbers, ReduceOp op) const {
  native();  // A null or closed group throws here.
  for (size_t i = 0; i < numbers.size(); ++i) check(numbers[i], i, op);
  Gathered gathered(*this, numbers, op);
  for (size_t i = 0; i < numbers.size(); ++i) gathered.reduce(numbers[i], i);
  // None is changed when one of them fails.
  for (size_t i = 0; i < numbers.size(); ++i) gathered.take(numbers[i], i);
}

}  // namespace lockstep
