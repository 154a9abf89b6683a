#pragma once

#include <string>

#include "lockstep/rpc/function.h"

namespace lockstep::rpc::detail {

struct Registered {
  Signature signature;
  Handler handler;
};

/// The function of that name in this process. Throws UsageError, with the nearest name, when there
/// is none. What it gives lives as long as the process.
const Registered& registered(const std::string& name);

}  // namespace lockstep::rpc::detail
