// ProcessGroup::all_reduce_values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>

#include "lockstep/base/error.h"
#include "lockstep/comm/process_group.h"
#include "tests/support/message_of.h"
#include "tests/support/over_backends.h"

namespace lockstep {
namespace group_numbers_test {

using test::message_of;
using ::testing::HasSubstr;

class GroupNumbers : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, GroupNumbers, test::over_backends(), test::backend_name);

TEST_P(GroupNumbers, AreSummedAsTheyAre) {
  for (const int size : {1, 2, 3}) {
    run_group(size, [&](ProcessGroup group) {
      const int rank = group.rank();
      double loss_sum = 0.1 * (rank + 1);
      int64_t correct = (int64_t{1} << 53) + rank;  // A double would lose the last bit.
      size_t seen = 5;
      float small = 0.25F;
      int32_t count = -rank;
      uint8_t byte = 7;
      group.all_reduce_values(loss_sum, correct, seen, small, count, byte);
      double expected = 0.1;
      for (int other = 1; other < size; ++other) expected += 0.1 * (other + 1);
      EXPECT_EQ(loss_sum, expected);
      EXPECT_EQ(correct, size * (int64_t{1} << 53) + size * (size - 1) / 2);
      EXPECT_EQ(seen, static_cast<size_t>(5 * size));
      EXPECT_EQ(small, 0.25F * static_cast<float>(size));
      EXPECT_EQ(count, -size * (size - 1) / 2);
      EXPECT_EQ(byte, 7 * size);
    });
  }
}

TEST_P(GroupNumbers, HaveTheOtherReductionsToo) {
  run_group(3, [&](ProcessGroup group) {
    const int rank = group.rank();
    double lowest = rank - 0.5;
    int64_t first = 10 - rank;
    bool all = rank != 1;
    group.all_reduce_values(ReduceOp::min, lowest, first, all);
    EXPECT_EQ(lowest, -0.5);
    EXPECT_EQ(first, 8);
    EXPECT_FALSE(all);

    float highest = rank == 1 ? std::nanf("") : 1.0F;
    bool any = rank == 1;
    uint64_t large = rank == 2 ? std::numeric_limits<uint64_t>::max() : 1;
    group.all_reduce_values(ReduceOp::max, highest, any, large);
    EXPECT_TRUE(std::isnan(highest));
    EXPECT_TRUE(any);
    EXPECT_EQ(large, std::numeric_limits<uint64_t>::max());

    double mean = rank;
    group.all_reduce_values(ReduceOp::avg, mean);
    EXPECT_EQ(mean, 1.0);
    int16_t product = static_cast<int16_t>(rank + 2);
    group.all_reduce_values(ReduceOp::product, product);
    EXPECT_EQ(product, 24);
    unsigned bits = 1U << rank;
    group.all_reduce_values(ReduceOp::bor, bits);
    EXPECT_EQ(bits, 7U);
  });
}

TEST_P(GroupNumbers, GoInOneMessage) {
  struct Counter : CallObserver {
    void call_begins() noexcept override {}
    void call_ended(const ObservedCall&, bool) noexcept override { ++calls; }
    std::atomic<int> calls{0};
  };
  run_group(2, [&](ProcessGroup group) {
    const auto counter = std::make_shared<Counter>();
    observe_calls(group, counter);
    double a = 1;
    int64_t b = 2;
    uint8_t c = 3;
    group.all_reduce_values(a, b, c);
    EXPECT_EQ(counter->calls, 1);
    observe_calls(group, nullptr);
  });
}

TEST_P(GroupNumbers, ThatDoNotFitTheirTypeAreAnErrorOnAllRanks) {
  run_group(2, [&](ProcessGroup group) {
    int32_t samples = 2'000'000'000;
    double loss = 1;
    EXPECT_THAT(
        message_of<NumericError>([&] { group.all_reduce_values(loss, samples); }),
        HasSubstr("the sum of argument 2 does not fit its type, int32\n  hint: take a wider "
                  "type"));
    EXPECT_EQ(samples, 2'000'000'000);  // Nothing is changed.
    EXPECT_EQ(loss, 1);
    // On the way to a sum that fits, one may not.
    int8_t passing = group.rank() == 0 ? int8_t{100} : int8_t{-100};
    group.all_reduce_values(passing);
    EXPECT_EQ(passing, 0);
    int64_t huge = std::numeric_limits<int64_t>::max();
    EXPECT_THROW(group.all_reduce_values(huge), NumericError);
  });
}

TEST_P(GroupNumbers, OfOtherTypesOnAnotherRankAreAMismatch) {
  run_group(2, [&](ProcessGroup group) {
    double real = 1;
    int64_t whole = 1;
    EXPECT_THROW(group.rank() == 0 ? group.all_reduce_values(real) : group.all_reduce_values(whole),
                 MismatchError);
    EXPECT_THROW(group.all_reduce_values(group.rank() == 0 ? ReduceOp::min : ReduceOp::max, real),
                 MismatchError);
    group.all_reduce_values(real);  // The group goes on.
    EXPECT_EQ(real, 2);
  });
}

TEST_P(GroupNumbers, RefuseWhatATypeHasNot) {
  run_group(1, [&](ProcessGroup group) {
    bool flag = true;
    int64_t whole = 1;
    double real = 1;
    EXPECT_THROW(group.all_reduce_values(real, flag), UsageError);
    EXPECT_THROW(group.all_reduce_values(ReduceOp::avg, whole), UsageError);
    EXPECT_THROW(group.all_reduce_values(ReduceOp::bxor, real), UsageError);
  });
  double real = 1;
  EXPECT_THROW(ProcessGroup().all_reduce_values(real), UsageError);
}

template <class... T>
constexpr bool kTaken = requires(const ProcessGroup& group, T&... numbers) {
  group.all_reduce_values(numbers...);
};
static_assert(kTaken<double, int, char, bool> && !kTaken<long double>);
static_assert(!kTaken<const double>);  // There would be no place for the result.
static_assert(!kTaken<at::Tensor> && !kTaken<>);

}  // namespace group_numbers_test
}  // namespace lockstep
