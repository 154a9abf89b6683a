#pragma once

#include <string>

#include "lockstep/base/process_identity.h"
#include "tests/support/other_process.h"

namespace lockstep::test_process {

/// For tests: what a process that has ended told of itself while it lived.
inline std::string ended_identity() {
  OtherProcess other([](const auto& ready) { ready(); });
  std::string identity = process_identity();
  const size_t number = identity.find(' ') + 1;
  identity.replace(number, identity.find(' ', number) - number, std::to_string(other.process()));
  return identity;
}

}  // namespace lockstep::test_process
