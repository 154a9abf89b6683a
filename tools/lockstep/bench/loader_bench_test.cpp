#include "tools/lockstep/bench/loader_bench.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

TEST(LoaderBench, ReadsEveryEpochWholeAndGivesARate) {
  auto rows = std::make_shared<std::atomic<int64_t>>(0);
  const TransformPtr count = batch_transform("count", [rows](const at::Tensor& batch) {
    if (batch.size(0) > 1) *rows += batch.size(0);  // one row of zeros: a question for the shape
    return batch;
  });
  const double rate = loader_samples_per_second(random_images(1000), {count, normalize()},
                                                {.loader = {.batch_size = 64}, .epochs = 3});
  EXPECT_EQ(*rows, 4 * 1000);  // the first epoch is to warm up
  EXPECT_GT(rate, 1000);       // three orders below what any machine reaches
  EXPECT_THROW(loader_samples_per_second(random_images(10), {}, {.epochs = 0}), UsageError);
}

}  // namespace
}  // namespace lockstep
