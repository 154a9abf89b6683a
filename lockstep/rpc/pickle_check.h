#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::rpc::detail {

struct PickleLimits {
  uint64_t bytes = 0;  ///< Of the value once it is read: shared parts count each time.
  int depth = 0;       ///< Of tuples within tuples.
  size_t tensors = 0;  ///< So many the message has.
};

/// A reference that a message brings to its receiver, as LibTorch numbers it.
struct CarriedReference {
  int64_t owner = 0, reference_on = 0, reference_id = 0, fork_on = 0, fork_id = 0, parent = 0;
};

/// What a pickle holds, as far as one must know to read it without danger.
struct PickleShape {
  bool is_tuple = false;
  uint32_t count = 0;         ///< Of a tuple's elements.
  int64_t first_number = -1;  ///< A tuple's first element where that is a whole number.
  std::vector<CarriedReference> references;
};

/// Looks whether LibTorch can read the bytes without danger. It knows the part of pickle that its
/// RPC writes: None, numbers, bool, strings, tuples, tensors and references. LibTorch's own reader
/// trusts counts that it is given, such as the places of its memo: 5 bytes make it take 64 GB.
/// The machine in lockstep/data/pickle.h makes values of what files hold. A message's values are
/// made by LibTorch, so here nothing is made: a walk that counts, on the path of every call.
/// Throws DataError, with the place and what is wrong there. Takes time and memory in proportion to
/// the bytes.
PickleShape check_pickle(std::string_view bytes, const PickleLimits& limits);

}  // namespace lockstep::rpc::detail
