#pragma once

#include <cstdint>

namespace lockstep::detail {

/// target[i] = source[i] * factor, for memory that does not overlap. A file of its own, for the
/// compiler to vectorise.
void scale(float* target, const float* source, int64_t count, float factor);
void scale(double* target, const double* source, int64_t count, double factor);

}  // namespace lockstep::detail
