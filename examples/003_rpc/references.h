// What an owner gives to a distributed optimizer.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/rpc/rpc.h"

namespace rpc_tutorial {

using Parameters = std::vector<lockstep::rpc::RRef<at::Tensor>>;

/// References to parameters of this worker.
inline Parameters references_to(const std::vector<at::Tensor>& parameters) {
  Parameters references;
  for (const auto& parameter : parameters) {
    references.push_back(lockstep::rpc::RRef<at::Tensor>::own(parameter));
  }
  return references;
}

}  // namespace rpc_tutorial
