#include "lockstep/comm/backend_registry.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/backends/gloo/gloo.h"
#include "lockstep/comm/backends/hierarchical/hierarchical.h"
#include "lockstep/comm/backends/mpi/mpi.h"
#include "lockstep/comm/backends/nccl/nccl.h"
#include "lockstep/comm/backends/shm/shm.h"

namespace lockstep {

std::vector<BackendInfo> available_backends() {
  return {nccl::info(), shm::info(), hierarchical::info(), gloo::info(), mpi::info()};
}

BackendInfo backend_info(const std::string& name) {
  std::vector<std::string> names;
  for (auto& info : available_backends()) {
    if (info.name == name) return info;
    names.push_back(info.name);
  }
  throw UsageError(unknown_word("backend", name, names));
}

c10::intrusive_ptr<c10d::Backend> make_backend(const std::string& name,
                                               const BackendOptions& options) {
  const BackendInfo info = backend_info(name);
  if (!info.available) {
    throw UsageError("backend '" + name + "' cannot be used: " + info.reason, info.remedy);
  }
  if (name == "nccl") return nccl::make(options);
  if (name == "mpi") return mpi::make(options);
  if (name == "hierarchical") {
    BackendOptions built_on_others = options;
    built_on_others.factory = make_backend;
    return hierarchical::make(built_on_others);
  }
  return name == "shm" ? shm::make(options) : gloo::make(options);
}

}  // namespace lockstep
