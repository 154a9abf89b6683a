#include "lockstep/rpc/function.h"

#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/rpc/rpc.h"
#include "tests/support/run_workers.h"

namespace lockstep::rpc {
namespace batched_test {

using namespace std::chrono_literals;
using test::run_workers;
using ::testing::HasSubstr;

// Each request with the number of those in its batch.
const auto count_together =
    batched("count_together",
            [](std::vector<int> requests) {
              std::vector<std::pair<int, int64_t>> results;
              for (const int request : requests) {
                if (request < 0) throw std::out_of_range("negative");
                results.emplace_back(request, static_cast<int64_t>(requests.size()));
              }
              return results;
            },
            {.size = 3, .delay = 100ms});
const auto doubled =
    batched("doubled", [](std::vector<at::Tensor> rows) { return (2 * at::stack(rows)).unbind(); },
            {.size = 2, .delay = 600s});
const auto forgets =
    batched("forgets", [](const std::vector<int>&) { return std::vector<int>(); }, {.size = 1});
const auto twice_there = function("twice_there", [](const std::string& worker, int number) {
  return call_async(worker, count_together, number).then([](const auto& future) {
    return future.wait().first * 2;
  });
});

// Each option may be left out, without a word of the compiler.
#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wmissing-field-initializers"
const BatchOptions kDelayAlone{.delay = 1ms};
const Options kOneAlone{.fast_calls = false};
#pragma GCC diagnostic pop

TEST(RpcBatched, AnswersWhenEnoughOrLate) {
  run_workers(2, [](Agent&, int rank) {
    if (rank != 0) return;
    std::vector<Future<std::pair<int, int64_t>>> calls;
    for (int i = 0; i < 7; ++i) calls.push_back(call_async("w1", count_together, i));
    const auto results = when_all(calls).wait();
    int64_t alone = 0;
    for (int i = 0; i < 7; ++i) {
      const auto& [request, together] = results[static_cast<size_t>(i)];
      EXPECT_EQ(request, i);
      EXPECT_TRUE(together == 3 || together == 1) << together;
      alone += together == 1;
    }
    EXPECT_EQ(alone, 1);  // Two full batches, and one request that was late.
    const auto one = call_async("w1", doubled, at::full({2}, 3.0));
    EXPECT_EQ(call("w1", doubled, at::full({2}, 4.0)).sum().item<double>(), 16);
    EXPECT_EQ(one.wait().sum().item<double>(), 12);
    EXPECT_EQ(call("w1", twice_there, "w0", 21), 42);
  });
}

TEST(RpcBatched, AFailureIsAllRequestsOfTheBatch) {
  run_workers(2, [](Agent&, int rank) {
    if (rank != 0) return;
    std::vector<Future<std::pair<int, int64_t>>> calls;
    for (const int number : {1, -1, 2}) calls.push_back(call_async("w1", count_together, number));
    for (const auto& future : calls) EXPECT_THROW(future.wait(), RemoteError);
    try {
      call("w1", forgets, 1);
      FAIL();
    } catch (const RemoteError& e) {
      EXPECT_THAT(e.message(), HasSubstr("a batch of 1 requests got 0 results"));
    }
    EXPECT_THROW(batched("none", [](const std::vector<int>& x) { return x; }, {.size = 0}),
                 UsageError);
  });
}

}  // namespace batched_test
}  // namespace lockstep::rpc
