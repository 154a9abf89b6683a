// The comparison of the ranks' calls: the half of call_signature.h that knows what each collective
// demands.
#include <algorithm>
#include <numeric>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/checks/call_signature.h"

namespace lockstep {
namespace {

using Calls = std::vector<CallSignature>;

constexpr const char* kSameCalls = "all ranks must make the same calls in the same order";

bool same_call(const CallSignature& a, const CallSignature& b) {
  return a.operation == b.operation && a.reduction == b.reduction && a.root == b.root &&
         a.sequence == b.sequence;
}

/// The names of what differs, for the hint.
std::string difference(const CallSignature& a, const CallSignature& b) {
  const auto tensors = [](const CallSignature& call) {
    auto all = call.inputs;
    all.insert(all.end(), call.outputs.begin(), call.outputs.end());
    return all;
  };
  if (a.operation != b.operation) return "operation";
  std::vector<std::string> names;
  if (a.sequence != b.sequence) names.push_back("sequence number");
  if (a.reduction != b.reduction) names.push_back("reduction");
  if (a.root != b.root) names.push_back("root");
  const auto of_a = tensors(a), of_b = tensors(b);
  if (of_a.size() != of_b.size()) {
    names.push_back("number of tensors");
  } else {
    if (!std::ranges::equal(of_a, of_b, {}, &TensorSignature::dtype, &TensorSignature::dtype))
      names.push_back("dtype");
    if (!std::ranges::equal(of_a, of_b, {}, &TensorSignature::shape, &TensorSignature::shape))
      names.push_back("shape");
  }
  if (a.input_splits != b.input_splits || a.output_splits != b.output_splits)
    names.push_back("splits");
  return join(names, " and ");
}

using Found = std::optional<Failure>;

/// `ranks`: one for each of the calls that differ.
Failure mismatch(const std::vector<int>& ranks, const RankNames& names, const std::string& text,
                 const std::string& differs) {
  std::vector<int> numbers;
  for (const int rank : ranks) numbers.push_back(names.at(static_cast<size_t>(rank)));
  return mismatch_of(numbers, text + "\n  hint: " + kSameCalls + "; here differs: " + differs);
}

/// Every rank must have made the call of the lowest rank, as far as `same` looks.
template <class Same>
Found expect_same(const Calls& calls, const RankNames& names, const std::string& group, Same same) {
  std::vector<std::vector<int>> sides;
  for (int rank = 0; rank < static_cast<int>(calls.size()); ++rank) {
    const auto side = std::find_if(sides.begin(), sides.end(), [&](const std::vector<int>& ranks) {
      return same(calls[static_cast<size_t>(ranks[0])], calls[static_cast<size_t>(rank)]);
    });
    if (side == sides.end()) {
      sides.push_back({rank});
    } else {
      side->push_back(rank);
    }
  }
  if (sides.size() == 1) return std::nullopt;
  const auto first_of = [&](size_t side) -> const CallSignature& {
    return calls[static_cast<size_t>(sides[side][0])];
  };
  const CallSignature& first = first_of(0);
  const std::string text = called(sides[0], first, names, group) + ", but ";
  std::vector<std::string> others;
  std::vector<int> ranks{sides[0][0]};
  for (size_t i = 1; i < sides.size(); ++i) {
    ranks.push_back(sides[i][0]);
    const CallSignature& call = first_of(i);
    std::string other = rank_list(sides[i], names) + " called " + describe(call, names);
    if (call.sequence != first.sequence) other += " as collective " + std::to_string(call.sequence);
    others.push_back(std::move(other));
  }
  return mismatch(ranks, names, text + join(others, " and "), difference(first, first_of(1)));
}

/// What rank `from` gives to rank `to` must be what that one expects.
Found expect_match(const Calls& calls, int from, const TensorSignature& given, int to,
                   const TensorSignature& expected, const RankNames& names,
                   const std::string& group) {
  if (given == expected) return std::nullopt;
  const auto& a = calls[static_cast<size_t>(from)];
  const auto& b = calls[static_cast<size_t>(to)];
  const std::string differs = given.dtype != expected.dtype ? "dtype" : "shape";
  const std::string text = called({from}, a, names, group);
  if (from == to)
    return mismatch(
        {from}, names,
        text + ", which gives itself " + describe(given) + " and expects " + describe(expected),
        differs);
  const std::string other = rank_list({to}, names);
  return mismatch({from, to}, names,
                  text + " and gives " + other + " " + describe(given) + ", but " + other +
                      " called " + describe(b, names) + " and expects " + describe(expected),
                  differs);
}

using Part = std::optional<TensorSignature>;

/// What each rank gives to each other must be what that one expects, as far as `given(from, to)`
/// and `expected(to, from)` say it.
template <class Given, class Expected>
Found expect_exchange(const Calls& calls, const RankNames& names, const std::string& group,
                      Given given, Expected expected) {
  for (size_t from = 0; from < calls.size(); ++from) {
    for (size_t to = 0; to < calls.size(); ++to) {
      const Part gives = given(from, to);
      const Part expects = gives ? expected(to, from) : std::nullopt;
      if (!expects) continue;
      if (auto bad = expect_match(calls, static_cast<int>(from), *gives, static_cast<int>(to),
                                  *expects, names, group))
        return bad;
    }
  }
  return std::nullopt;
}

/// The tensor at `index` of a list of `size`; none of a list of another size.
Part part_of(const std::vector<TensorSignature>& tensors, size_t index, size_t size) {
  return tensors.size() == size ? Part(tensors[index]) : std::nullopt;
}

/// The part of a tensor, cut along dimension 0 by `splits` or evenly, that belongs to `rank`.
Part cut_part_of(const std::vector<TensorSignature>& tensors, const std::vector<int64_t>& splits,
                 size_t rank, size_t size) {
  if (tensors.size() != 1 || tensors[0].shape.empty()) return std::nullopt;
  if (!splits.empty() && splits.size() != size) return std::nullopt;
  TensorSignature part = tensors[0];
  part.shape[0] = splits.empty() ? part.shape[0] / static_cast<int64_t>(size) : splits[rank];
  return part;
}

}  // namespace

Failure mismatch_of(const std::vector<int>& ranks, std::string text) {
  Failure failure{.kind = Failure::Kind::mismatch, .text = std::move(text)};
  for (const int rank : ranks) failure.ranks.push_back({rank, failure.kind});
  return failure;
}

std::exception_ptr mismatch_error(const Failure& mismatch) {
  return std::make_exception_ptr(MismatchError(mismatch.text, {}, mismatch));
}

std::optional<Failure> find_mismatch(const Calls& calls, const RankNames& told,
                                     const std::string& group) {
  const RankNames names = names_or_numbers(told, static_cast<int>(calls.size()));
  if (auto bad = expect_same(calls, names, group, same_call)) return bad;
  const auto same_inputs = [](const CallSignature& a, const CallSignature& b) {
    return a.inputs == b.inputs;
  };
  const size_t size = calls.size(), root = static_cast<size_t>(calls[0].root);
  const auto check = [&](auto given, auto expected) {
    return expect_exchange(calls, names, group, given, expected);
  };
  // Of a rank that gives or gets one tensor, and of one that has a list of one a rank.
  const auto only_input = [&](size_t from, size_t) { return part_of(calls[from].inputs, 0, 1); };
  const auto only_output = [&](size_t to, size_t) { return part_of(calls[to].outputs, 0, 1); };
  const auto listed_input = [&](size_t from, size_t to) {
    return part_of(calls[from].inputs, to, size);
  };
  const auto listed_output = [&](size_t to, size_t from) {
    return part_of(calls[to].outputs, from, size);
  };
  switch (calls[0].operation) {
    case Operation::gather:
      return check(
          [&](size_t from, size_t to) { return to == root ? only_input(from, to) : std::nullopt; },
          listed_output);
    case Operation::scatter:
      return check([&](size_t from,
                       size_t to) { return from == root ? listed_input(from, to) : std::nullopt; },
                   only_output);
    case Operation::all_to_all:
      return check(listed_input, listed_output);
    case Operation::all_to_all_single:
      return check(
          [&](size_t from, size_t to) {
            return cut_part_of(calls[from].inputs, calls[from].input_splits, to, size);
          },
          [&](size_t to, size_t from) {
            return cut_part_of(calls[to].outputs, calls[to].output_splits, from, size);
          });
    case Operation::reduce_scatter:
      if (auto bad = expect_same(calls, names, group, same_inputs)) return bad;
      // All ranks give the same list; each gets its own of it.
      return check([&](size_t from,
                       size_t to) { return from == to ? listed_input(from, to) : std::nullopt; },
                   only_output);
    case Operation::all_gather:
      // The list of outputs is the same on all ranks, and where its tensors differ (NCCL can) so do
      // the inputs.
      return expect_same(calls, names, group, [](const CallSignature& a, const CallSignature& b) {
        const bool even =
            std::equal(a.outputs.begin() + !a.outputs.empty(), a.outputs.end(), a.outputs.begin());
        return a.outputs == b.outputs && (!even || a.inputs == b.inputs);
      });
    default:
      return expect_same(calls, names, group, [](const CallSignature& a, const CallSignature& b) {
        return a.inputs == b.inputs && a.outputs == b.outputs;
      });
  }
}

std::optional<std::string> find_p2p_mismatch(const CallSignature& send, int sender,
                                             const CallSignature& recv, int receiver, int tag,
                                             const RankNames& names, const std::string& group) {
  const auto elements = [](const TensorSignature& tensor) {
    return std::accumulate(tensor.shape.begin(), tensor.shape.end(), int64_t{1},
                           std::multiplies<>());
  };
  if (send.inputs.size() != 1 || recv.outputs.size() != 1) return std::nullopt;
  const bool dtype = send.inputs[0].dtype != recv.outputs[0].dtype;
  const bool size = elements(send.inputs[0]) != elements(recv.outputs[0]);
  if (!dtype && !size) return std::nullopt;
  return rank_list({sender}, names) + " called " + describe(send, names) + " as message " +
         std::to_string(send.sequence) + " with tag " + std::to_string(tag) + " of group '" +
         group + "', but " + rank_list({receiver}, names) + " called " + describe(recv, names) +
         "\n  hint: a receive must have the dtype and the number of elements of its send; here "
         "differs: " +
         (dtype && size ? "dtype and size"
          : dtype       ? "dtype"
                        : "size");
}

}  // namespace lockstep
