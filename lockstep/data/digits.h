#pragma once

#include <cstdint>

namespace lockstep {

/// The side of a picture of render_digit, in pixels.
inline constexpr int kDigitSide = 28;

/// Draws sample `index` of the procedural digits of `seed` into `pixels` and returns its class, 0
/// to 9. `pixels` are 28 x 28 bytes, row by row; 0 is background, 255 full ink. Pen strokes of one
/// of several ways to write the digit are bent, rotated, scaled, sheared and shifted at random.
/// They are drawn with a pen of random width and pressure, and disturbed by blots, gaps and noise.
/// A function of (seed, index) alone, the same bits on every machine with IEEE doubles. Takes about
/// 8 us. Thread-safe.
uint8_t render_digit(uint64_t seed, uint64_t index, uint8_t* pixels);

}  // namespace lockstep
