#pragma once

// For tests: tensors whose sums and products are exact in every type and order.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <string>

namespace lockstep::test {

/// Small whole numbers, the same for the same seed and rank.
inline at::Tensor whole_numbers(uint64_t seed, int rank, at::IntArrayRef shape,
                                at::ScalarType type) {
  auto generator =
      at::make_generator<at::CPUGeneratorImpl>(seed * 64 + static_cast<uint64_t>(rank));
  const int64_t low = type == at::kByte || type == at::kBool ? 0 : -2;
  return at::randint(low, type == at::kBool ? 2 : 3, shape, generator, at::kLong).to(type);
}

inline void expect_same(const at::Tensor& actual, const at::Tensor& wanted,
                        const std::string& what) {
  EXPECT_TRUE(actual.equal(wanted)) << what << "\n"
                                    << actual.flatten().slice(0, 0, 8) << "\n"
                                    << wanted.flatten().slice(0, 0, 8);
}

}  // namespace lockstep::test
