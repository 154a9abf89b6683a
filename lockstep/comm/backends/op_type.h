#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/comm/checks/call_signature.h"

namespace lockstep::backends {

/// c10d's name of an operation, for a Work of it.
c10d::OpType op_type(Operation operation);

}  // namespace lockstep::backends
