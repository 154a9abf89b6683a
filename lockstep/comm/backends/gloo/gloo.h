#pragma once

#include "lockstep/comm/backends/backend.h"

namespace lockstep::gloo {

inline constexpr BackendTraits kTraits{.needs_comparison = true,
                                       .tells_only_waiters = true,
                                       .misses_deaths = true,
                                       .connects_one_by_one = true,
                                       .takes_cuda = true};

BackendInfo info();
MadeBackend make(const BackendOptions& options);

}  // namespace lockstep::gloo
