#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>

#include "lockstep/comm/checks/call_signature.h"
#include "lockstep/comm/checks/check_context.h"
#include "lockstep/comm/checks/checked_backend.h"

namespace c10d {
class Work;
}

namespace lockstep {

/// Decorates a work: wait, exception and future give what `convert` makes of its errors. All else
/// passes.
c10::intrusive_ptr<c10d::Work> make_translated_work(c10::intrusive_ptr<c10d::Work> inner,
                                                    ErrorConversion convert);

/// Decorates a backend's work: wait, exception and future give our errors. All else passes.
/// `misses_deaths`: CheckedBackendOptions. Waits for collectives then look for ranks that have
/// died, and those for messages without a time-out take that of the call: Gloo's is the one of
/// forming.
c10::intrusive_ptr<c10d::Work> make_checked_work(c10::intrusive_ptr<c10d::Work> inner,
                                                 std::shared_ptr<CheckContext> context,
                                                 CallSignature call,
                                                 std::chrono::milliseconds timeout,
                                                 bool misses_deaths = false);

}  // namespace lockstep
