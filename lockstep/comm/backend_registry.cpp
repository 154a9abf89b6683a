#include "lockstep/comm/backend_registry.h"

#include <array>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/words.h"
#include "lockstep/comm/backends/gloo/gloo.h"
#include "lockstep/comm/backends/hierarchical/hierarchical.h"
#include "lockstep/comm/backends/mpi/mpi.h"
#include "lockstep/comm/backends/nccl/nccl.h"
#include "lockstep/comm/backends/shm/shm.h"

namespace lockstep {

namespace {

struct Backend {
  BackendInfo (*info)();
  MadeBackend (*make)(const BackendOptions&);
};
/// In the order in which they are preferred.
constexpr std::array<Backend, 5> kBackends{{{nccl::info, nccl::make},
                                            {shm::info, shm::make},
                                            {hierarchical::info, hierarchical::make},
                                            {gloo::info, gloo::make},
                                            {mpi::info, mpi::make}}};

const Backend& backend_named(const std::string& name) {
  std::vector<std::string> names;
  for (const auto& backend : kBackends) {
    names.push_back(backend.info().name);
    if (names.back() == name) return backend;
  }
  throw UsageError(unknown_word("backend", name, names));
}

}  // namespace

std::vector<BackendInfo> available_backends() {
  std::vector<BackendInfo> infos;
  for (const auto& backend : kBackends) infos.push_back(backend.info());
  return infos;
}

BackendInfo backend_info(const std::string& name) {
  return backend_named(name).info();
}

MadeBackend make_backend(const std::string& name, const BackendOptions& options) {
  const Backend& backend = backend_named(name);
  const BackendInfo info = backend.info();
  if (!info.available)
    throw UsageError("backend '" + name + "' cannot be used: " + info.reason, info.remedy);
  return backend.make(options);
}

}  // namespace lockstep
