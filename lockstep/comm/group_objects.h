#pragma once

#include <c10/core/Device.h>

#include <optional>

#include "lockstep/base/state_dict.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::detail {

/// The tensors of rank `source`, on the CPU of every rank. `own` counts there only. They are sent
/// on `device`; none: where the group's backend communicates. A collective.
StateDict broadcast_state(const ProcessGroup& group, const StateDict& own, int source,
                          std::optional<c10::Device> device = {});

}  // namespace lockstep::detail
