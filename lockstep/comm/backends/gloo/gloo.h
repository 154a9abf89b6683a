#pragma once

#include "lockstep/comm/backends/backend.h"

namespace lockstep::gloo {

BackendInfo info();
c10::intrusive_ptr<c10d::Backend> make(const BackendOptions& options);

}  // namespace lockstep::gloo
