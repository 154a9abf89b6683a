#include "lockstep/comm/process_group.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/base/error.h"
#include "lockstep/comm/backends/common_memory.h"
#include "lockstep/comm/checks/checked_backend.h"
#include "lockstep/comm/group_impl.h"

namespace lockstep {

at::Tensor common_empty(const ProcessGroup& group, int64_t numel, at::ScalarType dtype) {
  if (!group) throw UsageError("common_empty: the process group is null");
  if (numel < 0)
    throw UsageError("common_empty: " + std::to_string(numel) + " elements, expected 0 or more");
  group.impl().backend();  // Throws once the group is closed.
  group.impl().expect_own_process();
  const auto backend = unchecked_backend(group.impl().handle());
  auto* const memory = dynamic_cast<backends::CommonMemory*>(backend.get());
  return memory != nullptr ? memory->allocate_common(numel, dtype) : at::Tensor();
}

}  // namespace lockstep
