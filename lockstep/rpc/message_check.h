#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/rpc/pickle_check.h"

namespace torch::distributed::rpc {
class Message;
}

namespace lockstep::rpc::detail {

struct MessageLimits {
  uint64_t bytes = 0;
  int depth = 0;  ///< Of tuples within tuples.
};

/// Looks whether the message is one that RPC sends, and whether LibTorch can read it without danger
/// (see check_pickle). Returns the references that it brings. Throws DataError, which says what is
/// wrong: it is of another kind, larger or deeper than the limits, or its bytes do not fit its
/// kind.
std::vector<CarriedReference> check_message(const torch::distributed::rpc::Message& message,
                                            const MessageLimits& limits);

/// The references in a message of our own, however large and deep it is.
std::vector<CarriedReference> references_in(const torch::distributed::rpc::Message& message);

}  // namespace lockstep::rpc::detail
