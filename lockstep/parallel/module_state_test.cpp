// What is wrong with the modules of a job is said on every rank, before training.
#include "lockstep/parallel/module_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "tests/support/ddp_test_modules.h"
#include "tests/support/run_group.h"

namespace lockstep {
namespace module_state_test {

using ::testing::HasSubstr;
using torch::nn::Module;

/// Over the default backend.
void run_group(int size, const std::function<void(ProcessGroup)>& body) {
  test::run_group(size, body, {.backend = "shm"});
}

struct Free : Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
};

/// Two ranks wrap what `make` gives; both must fail with a text that has all of `texts`.
void expect_mismatch(const std::function<void(Free&, int rank)>& make,
                     const std::vector<std::string>& texts) {
  run_group(2, [&](ProcessGroup group) {
    auto module = std::make_shared<Free>();
    module->register_parameter("same", at::zeros({2}));
    make(*module, group.rank());
    try {
      DistributedDataParallel ddp(module, group);
      ADD_FAILURE() << "accepted on rank " << group.rank();
    } catch (const MismatchError& error) {
      for (const std::string& text : texts) EXPECT_THAT(error.what(), HasSubstr(text));
      EXPECT_THAT(error.what(), HasSubstr("tensor 1"));
    }
  });
}

TEST(ModuleState, AnotherShapeIsNamed) {
  expect_mismatch(
      [](Free& module, int rank) {
        module.register_parameter("w", at::zeros({3, 4 + rank}));
      },
      {"rank 0 has parameter 'w' Float [3, 4]", "rank 1 has parameter 'w' Float [3, 5]"});
}

TEST(ModuleState, TensorsWithoutValuesAreRefused) {
  run_group(1, [](ProcessGroup group) {
    auto module = std::make_shared<Free>();
    module->register_parameter("here", at::zeros({2}));
    module->register_parameter("nowhere", at::zeros({2}, at::kMeta));
    try {
      DistributedDataParallel ddp(module, group);
      ADD_FAILURE() << "a parameter is on meta";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("parameter 'nowhere' is on device meta"));
      EXPECT_THAT(error.what(), HasSubstr("hint: make the module on a real device"));
    }
  });
}

TEST(ModuleState, AnotherNameIsNamed) {
  expect_mismatch([](Free& module,
                     int rank) { module.register_parameter(rank == 0 ? "a" : "b", at::zeros(3)); },
                  {"'a'", "'b'"});
}

TEST(ModuleState, AnotherDtypeIsNamed) {
  expect_mismatch(
      [](Free& module, int rank) {
        module.register_parameter("w", at::zeros(3, rank == 0 ? at::kFloat : at::kDouble));
      },
      {"Float", "Double"});
}

TEST(ModuleState, AMissingParameterIsNamed) {
  expect_mismatch(
      [](Free& module, int rank) {
        if (rank == 1) module.register_parameter("more", at::zeros(3));
      },
      {"rank 0 has nothing", "rank 1 has parameter 'more'"});
}

TEST(ModuleState, AFrozenParameterIsNamed) {
  expect_mismatch(
      [](Free& module, int rank) { module.register_parameter("w", at::zeros(3), rank == 0); },
      {"(frozen)"});
}

TEST(ModuleState, OtherStridesAreNamed) {
  expect_mismatch(
      [](Free& module, int rank) {
        const at::Tensor square = at::zeros({3, 3});
        module.register_parameter("w", rank == 0 ? square : square.t());
      },
      {"strides [3, 1]", "strides [1, 3]"});
}

TEST(ModuleState, ABufferThatDiffersIsNamed) {
  expect_mismatch(
      [](Free& module, int rank) { module.register_buffer("count", at::zeros(1 + rank)); },
      {"buffer 'count'"});
}

TEST(ModuleState, NothingToTrainIsAUsageError) {
  run_group(1, [&](ProcessGroup group) {
    auto module = std::make_shared<Free>();
    EXPECT_THROW(DistributedDataParallel(module, group), UsageError);
    module->register_parameter("w", at::zeros(3), /*requires_grad=*/false);
    EXPECT_THROW(DistributedDataParallel(module, group), UsageError);
  });
}

TEST(ModuleState, ANullGroupIsAUsageError) {
  auto module = std::make_shared<ddp_test::Net>();
  EXPECT_THROW(DistributedDataParallel(module, ProcessGroup()), UsageError);
}

TEST(ModuleState, BadBucketSizesAreUsageErrors) {
  run_group(2, [&](ProcessGroup group) {
    auto module = std::make_shared<ddp_test::Net>();
    DdpOptions options;
    options.bucket_cap_mb = -1;
    EXPECT_THROW(DistributedDataParallel(module, group, options), UsageError);
  });
}

TEST(ModuleState, NamesAreInPythonsOrderWithEachTensorOnce) {
  const auto tied = std::make_shared<ddp_test::Tied>();
  EXPECT_EQ(detail::find_module_state(*tied, {}, "test").parameters.size(), 1u);
  const auto lookup = std::make_shared<ddp_test::Lookup>();
  const detail::ModuleState state = detail::find_module_state(*lookup, {}, "test");
  ASSERT_EQ(state.reduced.size(), 3u);
  EXPECT_EQ(state.reduced[0].name, "table.weight");
  EXPECT_TRUE(state.reduced[0].sparse_gradient);
  EXPECT_EQ(state.reduced[1].name, "linear.weight");
  EXPECT_FALSE(state.reduced[1].sparse_gradient);
}

}  // namespace module_state_test
}  // namespace lockstep
