#pragma once

#include <cstdint>

namespace lockstep {

// Whether `count` numbers are finite, told by the bits of their exponents.
bool are_finite(const double* data, int64_t count);
bool are_finite(const float* data, int64_t count);
/// Of IEEE's half precision, or of bfloat16, as their bits.
bool are_finite_half(const uint16_t* data, int64_t count);
bool are_finite_bfloat16(const uint16_t* data, int64_t count);

}  // namespace lockstep
