// The comparison of the ranks' calls: the half of call_signature.h that knows what each collective
// demands.
#include <c10/util/accumulate.h>

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/checks/call_signature.h"

namespace lockstep {
namespace {

using Calls = std::vector<CallSignature>;

bool same_call(const CallSignature& a, const CallSignature& b) {
  return a.operation == b.operation && a.reduction == b.reduction && a.root == b.root &&
         a.sequence == b.sequence;
}

using Found = std::optional<Failure>;

/// `ranks`: one for each of the calls that differ.
Failure mismatch(const std::vector<int>& ranks, const RankNames& names, const std::string& text) {
  std::vector<int> numbers;
  for (const int rank : ranks) numbers.push_back(names.at(static_cast<size_t>(rank)));
  return mismatch_of(numbers,
                     text +
                         "\n  hint: all ranks must make the same calls in the same order; do their "
                         "loops have the same length, and the same batches in each step?");
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
  return mismatch(ranks, names, text + join(others, " and "));
}

/// What rank `from` gives to rank `to` must be what that one expects.
Found expect_match(const Calls& calls, int from, const TensorSignature& given, int to,
                   const TensorSignature& expected, const RankNames& names,
                   const std::string& group) {
  if (given == expected) return std::nullopt;
  const auto& a = calls[static_cast<size_t>(from)];
  const auto& b = calls[static_cast<size_t>(to)];
  const std::string other = rank_list({to}, names);
  return mismatch({from, to}, names,
                  called({from}, a, names, group) + " and gives " + other + " " + describe(given) +
                      ", but " + other + " called " + describe(b, names) + " and expects " +
                      describe(expected));
}

/// What a call of an all_to_all gives to each rank, or gets from it: a list of tensors, or one that
/// is cut along dimension 0 by `splits` or evenly. None where it does not have as many.
TensorSignatures parts_of(const CallSignature& call, const TensorSignatures& tensors,
                          const std::vector<int64_t>& splits, size_t size) {
  if (call.operation == Operation::all_to_all)
    return tensors.size() == size ? tensors : TensorSignatures();
  const bool fits = splits.empty() || splits.size() == size;
  if (!fits || tensors.size() != 1 || tensors[0].shape.empty()) return {};
  TensorSignatures parts(size, tensors[0]);
  for (size_t rank = 0; rank < size; ++rank) {
    int64_t& rows = parts[rank].shape[0];
    rows = splits.empty() ? rows / static_cast<int64_t>(size) : splits[rank];
  }
  return parts;
}

/// What each rank gives to each other must be what that one expects.
Found expect_exchange(const Calls& calls, const RankNames& names, const std::string& group) {
  std::vector<TensorSignatures> given, expected;
  for (const CallSignature& call : calls) {
    given.push_back(parts_of(call, call.inputs, call.input_splits, calls.size()));
    expected.push_back(parts_of(call, call.outputs, call.output_splits, calls.size()));
  }
  for (size_t from = 0; from < calls.size(); ++from) {
    for (size_t to = 0; to < calls.size(); ++to) {
      if (given[from].empty() || expected[to].empty()) continue;
      if (auto bad = expect_match(calls, static_cast<int>(from), given[from][to],
                                  static_cast<int>(to), expected[to][from], names, group))
        return bad;
    }
  }
  return std::nullopt;
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
  // Whether the root's list, or the outputs, fit is for the backend to see.
  switch (calls[0].operation) {
    case Operation::gather:
    case Operation::reduce_scatter:
      return expect_same(calls, names, group, same_inputs);
    case Operation::scatter:
      return expect_same(calls, names, group, [](const CallSignature& a, const CallSignature& b) {
        return a.outputs == b.outputs;
      });
    case Operation::all_to_all:
    case Operation::all_to_all_single:
      return expect_exchange(calls, names, group);
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

std::optional<std::string> find_p2p_mismatch(const CallSignature& send, const CallSignature& recv,
                                             int tag, const RankNames& names,
                                             const std::string& group) {
  if (send.inputs.size() != 1 || recv.outputs.size() != 1) return std::nullopt;
  const TensorSignature &sent = send.inputs[0], &received = recv.outputs[0];
  if (sent.dtype == received.dtype &&
      c10::multiply_integers(sent.shape) == c10::multiply_integers(received.shape))
    return std::nullopt;
  return rank_list({recv.root}, names) + " called " + describe(send, names) + " as message " +
         std::to_string(send.sequence) + " with tag " + std::to_string(tag) + " of group '" +
         group + "', but " + rank_list({send.root}, names) + " called " + describe(recv, names) +
         "\n  hint: a receive must have the dtype and the number of elements of its send";
}

}  // namespace lockstep
