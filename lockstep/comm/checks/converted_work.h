#pragma once

#include <c10/util/intrusive_ptr.h>

#include "lockstep/comm/checks/error_conversion.h"

namespace c10d {
class Work;
}

namespace lockstep {

/// A work whose errors are what `convert` makes of the inner one's. Null stays null.
c10::intrusive_ptr<c10d::Work> make_converted_work(c10::intrusive_ptr<c10d::Work> inner,
                                                   ErrorConversion convert);

}  // namespace lockstep
