#pragma once

#include <c10/util/intrusive_ptr.h>

#include <exception>
#include <functional>

namespace c10d {
class Work;
}

namespace lockstep {

/// Makes another error of one. Any thread.
using ErrorConversion = std::function<std::exception_ptr(std::exception_ptr)>;

/// Decorates a work: wait, exception and future give the error that `convert` makes of its own. All
/// else passes. Null stays null.
c10::intrusive_ptr<c10d::Work> make_converted_work(c10::intrusive_ptr<c10d::Work> inner,
                                                   ErrorConversion convert);

}  // namespace lockstep
