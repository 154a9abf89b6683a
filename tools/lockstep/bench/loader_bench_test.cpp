#include "tools/lockstep/bench/loader_bench.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep {
namespace loader_bench_test {

/// A clock by which the epochs, the warm-up first, take these seconds.
std::function<double()> epochs_of(std::vector<double> seconds) {
  return [seconds, now = 0.0, reading = size_t{0}]() mutable {
    if (reading++ % 2 == 1) now += seconds.at(reading / 2 - 1);
    return now;
  };
}

class LoaderBench : public testing::TestWithParam<int> {};

TEST_P(LoaderBench, CountsEverySampleAndGivesTheMedianOfTheEpochs) {
  auto rows = std::make_shared<std::atomic<int64_t>>(0);
  const TransformPtr count = batch_transform("count", [rows](const at::Tensor& batch) {
    if (batch.size(0) > 1) *rows += batch.size(0);  // one row of zeros: a question for the shape
    return batch;
  });
  LoaderBenchOptions options{.loader = {.batch_size = 64, .num_workers = GetParam()}, .epochs = 3};
  options.seconds = epochs_of({16, 4, 1, 2});
  EXPECT_EQ(loader_samples_per_second(random_images(1000), {count, normalize()}, options), 500);
  EXPECT_EQ(*rows, 4 * 1000);  // the first epoch is to warm up
}

INSTANTIATE_TEST_SUITE_P(Workers, LoaderBench, testing::Values(0, 1, 3));

TEST(LoaderBenchOptions, NeedAnEpoch) {
  EXPECT_THROW(loader_samples_per_second(random_images(10), {}, {.epochs = 0}), UsageError);
}

}  // namespace loader_bench_test
}  // namespace lockstep
