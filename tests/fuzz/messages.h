#pragma once

// Sends and receives of a step.

#include <memory>

#include "tests/fuzz/execution.h"

namespace lockstep::fuzz {

/// Messages between any ranks, blocking one after the other, or all at once in an order of each
/// rank's own. Where one rank deviates, its messages fail with MismatchError on both sides, and the
/// others arrive.
std::unique_ptr<Running> start_exchange(const Call& call);

/// One rank receives from any, the others send.
std::unique_ptr<Running> start_collection(const Call& call);

}  // namespace lockstep::fuzz
