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

/// What a wait does for a backend that does not do it itself.
enum class WorkWatch {
  none,
  deaths,  ///< It looks for ranks that have died: see CheckedBackendOptions::misses_deaths.
  limit,   ///< Without a time-out it takes that of the call: Gloo's is the one of forming.
};

/// Decorates a work: wait, exception and future give what `convert` makes of its errors. All else
/// passes.
c10::intrusive_ptr<c10d::Work> make_translated_work(c10::intrusive_ptr<c10d::Work> inner,
                                                    ErrorConversion convert);

/// Decorates a backend's work: wait, exception and future give our errors. All else passes.
c10::intrusive_ptr<c10d::Work> make_checked_work(c10::intrusive_ptr<c10d::Work> inner,
                                                 std::shared_ptr<CheckContext> context,
                                                 CallSignature call,
                                                 std::chrono::milliseconds timeout,
                                                 WorkWatch watch = WorkWatch::none);

}  // namespace lockstep
