#pragma once

#include "lockstep/parallel/ddp.h"

namespace c10d {
class Reducer;
}

namespace lockstep::detail {

/// Installs the options' hook, if any.
void register_hook(c10d::Reducer& reducer, const ProcessGroup& group, const DdpOptions& options);

}  // namespace lockstep::detail
