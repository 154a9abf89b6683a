#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/failure.h"
#include "lockstep/comm/checks/observed_call.h"

namespace lockstep {

struct TensorSignature {
  c10::ScalarType dtype;
  at::DimVector shape;
  bool operator==(const TensorSignature&) const = default;
};
/// One tensor of few dimensions takes no memory of its own.
using TensorSignatures = c10::SmallVector<TensorSignature, 1>;

/// What one rank called, as far as the ranks must agree on it.
struct CallSignature {
  Operation operation = Operation::barrier;
  int reduction = -1;  ///< c10d::ReduceOp::RedOpType; -1: none.
  int root = -1;       ///< Rank of the group; -1: none. Of a message the other rank.
  /// How many collectives of the group this rank has called by now. Where messages are compared:
  /// the number of the message in its channel, from 1.
  uint64_t sequence = 0;
  TensorSignatures inputs{};             ///< What this rank gives.
  TensorSignatures outputs{};            ///< What it gets, where the ranks' views of it differ.
  std::vector<int64_t> input_splits{};   ///< all_to_all_single: rows for each rank.
  std::vector<int64_t> output_splits{};  ///< Likewise, from each rank.
  std::string origin{};                  ///< What it is for: CallOrigin. Not compared.

  bool is_message() const { return operation >= Operation::send; }
  /// The other rank of a message; -1 for a collective, and for a receive from any.
  int peer() const { return is_message() ? root : -1; }
};

/// Of an undefined tensor: no dtype and no shape.
TensorSignature signature_of(const at::Tensor& tensor);
TensorSignatures signatures_of(at::ArrayRef<at::Tensor> tensors);

/// Ranks of the group, by their number in the default group.
using RankNames = std::vector<int>;
/// The names of `size` ranks: themselves where none are told.
RankNames names_or_numbers(RankNames names, int size);
/// "rank 3", "ranks 1 and 3", "ranks 1, 2 and 5".
std::string rank_list(const std::vector<int>& group_ranks, const RankNames& names);

/// "sum", ...: by c10d::ReduceOp::RedOpType.
std::string reduction_name(int reduction);

/// "all_reduce(sum) of float32 [3, 4]", "broadcast(root 0) of int64 []",
/// "scatter(root 1) of 2 x float32 [5] into float32 [5]", "barrier".
std::string describe(const CallSignature& call, const RankNames& names);
std::string describe(const TensorSignature& tensor);

/// "rank 3 called barrier as collective 7 of group 'default'".
std::string called(const std::vector<int>& ranks, const CallSignature& call, const RankNames& names,
                   const std::string& group);

/// Bytes that travel between ranks on hosts of one byte order.
std::string encode(const CallSignature& call);
/// Throws CommError for bytes that `encode` did not make.
CallSignature decode(std::string_view bytes);

/// Ranks, by their numbers in the default group, no two of which called the same.
Failure mismatch_of(const std::vector<int>& ranks, std::string text = {});
/// The error with the failure's text.
std::exception_ptr mismatch_error(const Failure& mismatch);

/// Compares what the ranks of `group` called, one signature per rank. None when they agree. Else
/// its text is "rank 0 called A as collective 7 of group 'default', but rank 1 called B", and its
/// ranks are one for each of these calls.
std::optional<Failure> find_mismatch(const std::vector<CallSignature>& calls,
                                     const RankNames& names, const std::string& group);

/// The same for one send and its receive.
std::optional<std::string> find_p2p_mismatch(const CallSignature& send, const CallSignature& recv,
                                             int tag, const RankNames& names,
                                             const std::string& group);

}  // namespace lockstep
