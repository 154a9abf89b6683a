#pragma once

#include "lockstep/comm/backends/backend.h"

namespace lockstep::gloo {

BackendInfo info();
c10::intrusive_ptr<c10d::Backend> make(const BackendOptions& options);

/// Whether a group's `setTimeout` is heeded; LibTorch's before 2.13 refuses it.
bool takes_timeouts();

}  // namespace lockstep::gloo
