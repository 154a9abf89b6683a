#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::rpc::detail {

struct MessageLimits {
  uint64_t bytes = 0;
  int depth = 0;  ///< Of tuples within tuples.
};

/// Appends values to `bytes` in a form of our own, for messages within a host: None, bool, int64,
/// double, strings, tuples and plain tensors of the CPU. False when one is of another kind, lies
/// deeper than the limit, or makes `bytes` larger than it. Then what was appended means nothing.
///
/// A tensor is contiguous, and shares its memory with no other of the message, though it may come
/// twice. It arrives with memory of its own. `requires_grad` goes along, what computed the tensor
/// does not.
bool encode_values(c10::ArrayRef<at::IValue> values, const MessageLimits& limits,
                   std::string& bytes);

/// The values again, which own their memory. Throws DataError, with the place, for bytes that
/// `encode_values` has not made or that end too early. Takes time and memory in proportion to them.
std::vector<at::IValue> decode_values(std::string_view bytes, int depth);

}  // namespace lockstep::rpc::detail
