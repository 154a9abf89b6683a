// ProcessGroup::all_reduce_values: each rank gathers all ranks' numbers and reduces them itself.
// So one message carries any mixture of types, and none goes through another type.

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

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

/// Calls `f` with a value of the number's type, whose own value does not matter.
template <class F>
auto with_type(const NumberReference& number, F f) {
  switch (number.kind()) {
    case Kind::boolean:
      return f(bool{});
    case Kind::floating:
      if (number.bytes() == sizeof(float)) return f(float{});
      return number.bytes() == sizeof(double) ? f(double{}) : f((long double){});
    case Kind::signed_integer:
      return number.bytes() == 1   ? f(int8_t{})
             : number.bytes() == 2 ? f(int16_t{})
             : number.bytes() == 4 ? f(int32_t{})
                                   : f(int64_t{});
    case Kind::unsigned_integer:
      break;
  }
  return number.bytes() == 1   ? f(uint8_t{})
         : number.bytes() == 2 ? f(uint16_t{})
         : number.bytes() == 4 ? f(uint32_t{})
                               : f(uint64_t{});
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

/// False when the result does not fit.
template <class T>
bool combine_whole(ReduceOp op, T& result, T value) {
  switch (op) {
    case ReduceOp::sum:
      return !__builtin_add_overflow(result, value, &result);
    case ReduceOp::product:
      return !__builtin_mul_overflow(result, value, &result);
    case ReduceOp::min:
      result = std::min(result, value);
      return true;
    case ReduceOp::max:
      result = std::max(result, value);
      return true;
    case ReduceOp::band:
      result = static_cast<T>(result & value);
      return true;
    case ReduceOp::bor:
      result = static_cast<T>(result | value);
      return true;
    case ReduceOp::bxor:
      result = static_cast<T>(result ^ value);
      return true;
    case ReduceOp::avg:
      break;
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

  /// Writes the result of `number`, the one at `index`, into its place among this rank's own.
  void reduce(const NumberReference& number, size_t index) {
    with_type(number, [&]<class T>(T) { write(index, reduced<T>(index, number)); });
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
          "all ranks must give the same types in the same order, and the same reduction");
    }
  }

  template <class T>
  T value(int rank, size_t index) const {
    T value{};
    std::memcpy(&value, lane(rank, index + 1), sizeof(T));
    return value;
  }

  template <class T>
  void write(size_t index, T result) {
    std::memcpy(lane(0, index + 1), &result, sizeof(T));
  }

  template <class T>
  T reduced(size_t index, const NumberReference& number) const {
    if constexpr (std::is_same_v<T, bool>) {
      // As whole numbers of one bit.
      uint8_t result = value<bool>(0, index);
      for (int rank = 1; rank < ranks_; ++rank)
        combine_whole<uint8_t>(op_, result, value<bool>(rank, index));
      return result != 0;
    } else if constexpr (std::is_integral_v<T>) {
      return whole<T>(index, number);
    } else {
      using Wide = std::conditional_t<std::is_same_v<T, float>, double, T>;
      Wide result = value<T>(0, index);
      for (int rank = 1; rank < ranks_; ++rank)
        combine_floating<Wide>(op_, result, value<T>(rank, index));
      return static_cast<T>(op_ == ReduceOp::avg ? result / static_cast<Wide>(ranks_) : result);
    }
  }

  /// A sum that fits may pass the ends of the type on its way, so it is made in a wider one.
  template <class T>
  T whole(size_t index, const NumberReference& number) const {
    __extension__ using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    Wide result = value<T>(0, index);
    bool fits = true;
    for (int rank = 1; rank < ranks_; ++rank)
      fits = combine_whole<Wide>(op_, result, value<T>(rank, index)) && fits;
    if (fits && static_cast<Wide>(static_cast<T>(result)) == result) return static_cast<T>(result);
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
