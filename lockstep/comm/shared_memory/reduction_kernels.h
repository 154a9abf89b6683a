#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::shm {

/// As c10::ScalarType.
enum class DataType : uint8_t {
  u8,
  i8,
  i16,
  i32,
  i64,
  f16,
  f32,
  f64,
  c64 = 9,
  c128,
  boolean,
  bf16 = 15
};
/// As c10d::ReduceOp.
enum class Reduction : uint8_t { sum, avg, product, min, max, band, bor, bxor };

/// target[i] = the reduction of sources[0][i], ..., sources[n - 1][i], for all of `bytes`, in a
/// fixed binary tree. The first half (the largest power of two below n) is joined with the rest,
/// and so on within each. So the bits do not depend on which rank computes them nor on how the data
/// is cut. For powers of two they are those of recursive doubling. f16 and bf16 are computed in
/// float and rounded once. avg divides the sum by n, integers towards zero. min and max hand a NaN
/// on. For boolean, sum and product are or and and.
///
/// `target` may be one of the sources. Otherwise they do not overlap.
using ReduceKernel = void (*)(void* target, const void* const* sources, int n, size_t bytes);

/// The one for this processor. Null for other types, and where the reduction has no meaning for the
/// type (bitwise ones of floating-point numbers, min and max of complex ones).
ReduceKernel reduce_kernel(DataType type, Reduction reduction);

}  // namespace lockstep::shm
