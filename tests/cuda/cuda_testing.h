#pragma once

// For tests on one GPU: groups of NCCL, which takes one rank a device, and of Gloo.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>

#include "lockstep/base/state_dict.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/world.h"
#include "tests/support/run_group.h"

namespace lockstep::cuda_test {

inline const at::Device kGpu{at::kCUDA, 0};

/// Skips where there is no GPU.
class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "there is no CUDA device";
  }
};

/// Skips where NCCL cannot be used.
class Nccl : public ::testing::Test {
 protected:
  void SetUp() override {
    const BackendInfo info = backend_info("nccl");
    if (!info.available) GTEST_SKIP() << info.reason;
  }
};

/// A job of one rank on the GPU.
inline World world_of_one() {
  InitOptions options;
  options.backend = "nccl";
  options.store = hash_store();
  options.rank = 0;
  options.world_size = 1;
  return init(options);
}

inline void expect_equal(const at::Tensor& got, const at::Tensor& expected,
                         const std::string& what = {}) {
  EXPECT_TRUE(at::equal(got.cpu(), expected.cpu()))
      << what << " " << got.cpu() << "\nexpected " << expected.cpu();
}

/// The bits of a model or of a state, on the CPU.
inline void expect_same_state(const StateDict& got, const StateDict& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].first, expected[i].first);
    EXPECT_TRUE(at::equal(got[i].second.cpu(), expected[i].second.cpu())) << got[i].first;
  }
}

}  // namespace lockstep::cuda_test
