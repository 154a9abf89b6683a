#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/ddp.h"
#include "tests/support/ddp_test_modules.h"
#include "tests/support/over_backends.h"

namespace lockstep {
namespace comm_hook_test {

using ddp_test::fill;
using ddp_test::Net;
using ddp_test::values;
using ::testing::HasSubstr;

at::Tensor flat_gradients(torch::nn::Module& module) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& parameter : module.parameters())
    parts.push_back(parameter.grad().flatten());
  return at::cat(parts);
}

class CommHooks : public test::OverBackends {
 protected:
  /// The gradients after `steps` steps of two ranks with these options, as rank 0 has them.
  static at::Tensor result_of(const DdpOptions& options, int ranks = 2, int steps = 3);
  static void expect_refused(const GradientHook& hook, const std::string& text);
};
INSTANTIATE_TEST_SUITE_P(All, CommHooks, test::over_backends(), test::backend_name);

at::Tensor CommHooks::result_of(const DdpOptions& options, int ranks, int steps) {
  at::Tensor result;
  run_group(ranks, [&](ProcessGroup group) {
    auto net = std::make_shared<Net>();
    fill(*net, 1);
    DistributedDataParallel ddp(net, group, options);
    for (int step = 0; step < steps; ++step) {
      zero_grad(net->parameters());
      ddp(values({4, 6}, group.rank())).square().sum().backward();
    }
    if (group.rank() == 0) result = flat_gradients(*net).clone();
  });
  return result;
}

DdpOptions with(CommHook hook) {
  DdpOptions options;
  options.comm_hook = hook;
  return options;
}

TEST_P(CommHooks, AllReduceIsTheDefault) {
  EXPECT_TRUE(at::equal(result_of(with(CommHook::allreduce)), result_of({})));
}

TEST_P(CommHooks, CompressionLosesNoMoreThanItsPrecision) {
  const at::Tensor exact = result_of({});
  // Halved and rounded on each rank, added and rounded: three half-ulps of the narrow type.
  const at::Tensor fp16 = result_of(with(CommHook::fp16_compress));
  EXPECT_TRUE(at::allclose(fp16, exact, 3.0 / (1 << 11), 1e-3));
  EXPECT_FALSE(at::equal(fp16, exact));
  for (const bool view : {true, false}) {
    DdpOptions options = with(CommHook::bf16_compress);
    options.gradient_as_bucket_view = view;
    const at::Tensor bf16 = result_of(options);
    EXPECT_TRUE(at::allclose(bf16, exact, 3.0 / (1 << 8), 1e-2));
    EXPECT_FALSE(at::equal(bf16, exact));
    EXPECT_FALSE(at::equal(bf16, fp16));
  }
}

TEST_P(CommHooks, CompressionAlsoOnOneRank) {
  const at::Tensor exact = result_of({}, 1);
  EXPECT_TRUE(at::equal(result_of(with(CommHook::bf16_compress), 1),
                        exact.to(at::kBFloat16).to(at::kFloat)));
  EXPECT_TRUE(
      at::equal(result_of(with(CommHook::fp16_compress), 1), exact.to(at::kHalf).to(at::kFloat)));
}

at::Tensor mean_of(const ProcessGroup& group, GradientBucket& bucket) {
  at::Tensor sum = bucket.gradients / group.size();
  group.all_reduce(sum);
  return sum;
}

TEST_P(CommHooks, TheUsersOwn) {
  for (const bool view : {true, false}) {
    DdpOptions options;
    options.gradient_as_bucket_view = view;
    options.custom_hook = mean_of;
    EXPECT_TRUE(at::equal(result_of(options), result_of({})));
    options.custom_hook = [](const ProcessGroup& group, GradientBucket& bucket) {
      return mean_of(group, bucket) * 2;
    };
    EXPECT_TRUE(at::equal(result_of(options), result_of({}) * 2));
    options.custom_hook = [](const ProcessGroup& group, GradientBucket& bucket) {
      bucket.gradients.div_(group.size());
      group.all_reduce(bucket.gradients);
      return bucket.gradients;
    };
    EXPECT_TRUE(at::equal(result_of(options), result_of({}))) << "in place";
  }
}

TEST_P(CommHooks, TheUsersOwnInTwoParts) {
  DdpOptions options;
  options.bucket_cap_mb = 50.0 / (1024 * 1024);
  const at::Tensor expected = result_of(options);
  options.async_custom_hook = [](const ProcessGroup& group, GradientBucket& bucket) {
    auto sum = std::make_shared<at::Tensor>(bucket.gradients / group.size());
    Work work = group.all_reduce_async(*sum);
    return [work, sum] {
      work.wait();
      return *sum;
    };
  };
  EXPECT_TRUE(at::equal(result_of(options), expected));
}

TEST_P(CommHooks, BucketsTellWhatIsInThem) {
  run_group(2, [&](ProcessGroup group) {
    std::vector<GradientBucket> seen;
    DdpOptions options;
    options.bucket_cap_mb = 50.0 / (1024 * 1024);
    options.custom_hook = [&](const ProcessGroup& own, GradientBucket& bucket) {
      seen.push_back(bucket);
      return mean_of(own, bucket);
    };
    auto net = std::make_shared<Net>();
    fill(*net, 1);
    DistributedDataParallel ddp(net, group, options);
    for (int step = 0; step < 2; ++step) {
      seen.clear();
      zero_grad(net->parameters());
      ddp(values({4, 6}, 0)).sum().backward();
    }
    ASSERT_EQ(seen.size(), ddp.statistics().bucket_bytes.size());
    ASSERT_GT(seen.size(), 1u);
    for (size_t i = 0; i < seen.size(); ++i) {
      EXPECT_EQ(seen[i].index, i);
      EXPECT_EQ(seen[i].is_last, i + 1 == seen.size());
      int64_t elements = 0;
      for (const at::Tensor& parameter : seen[i].parameters) elements += parameter.numel();
      EXPECT_EQ(seen[i].gradients.numel(), elements);
    }
    // Backward comes to the last layer's parameters first.
    EXPECT_TRUE(seen[0].parameters[0].is_same(net->second->bias) ||
                seen[0].parameters[0].is_same(net->second->weight));
  });
}

void CommHooks::expect_refused(const GradientHook& hook, const std::string& text) {
  run_group(2, [&](ProcessGroup group) {
    DdpOptions options;
    options.custom_hook = hook;
    auto net = std::make_shared<Net>();
    fill(*net, 1);
    DistributedDataParallel ddp(net, group, options);
    try {
      ddp(values({4, 6}, 0)).sum().backward();
      ADD_FAILURE() << "accepted";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
  });
}

TEST_P(CommHooks, AResultThatDoesNotFitIsRefused) {
  expect_refused([](const ProcessGroup&, GradientBucket&) { return at::zeros({7}); }, "7 elements");
  expect_refused([](const ProcessGroup&, GradientBucket&) { return at::Tensor(); }, "no tensor");
  expect_refused([](const ProcessGroup&, GradientBucket& b) { return b.gradients.to(at::kDouble); },
                 "Double");
}

TEST_P(CommHooks, ItsErrorLeavesBackward) {
  expect_refused(
      [](const ProcessGroup&, GradientBucket&) -> at::Tensor { throw UsageError("my own"); },
      "my own");
}

}  // namespace comm_hook_test
}  // namespace lockstep
