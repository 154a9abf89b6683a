#pragma once

#include <exception>
#include <functional>

namespace lockstep {

/// Makes another error of one. Any thread.
using ErrorConversion = std::function<std::exception_ptr(std::exception_ptr)>;

}  // namespace lockstep
