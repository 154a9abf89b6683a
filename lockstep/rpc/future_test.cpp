#include "lockstep/rpc/future.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>

namespace lockstep::rpc {
namespace future_test {

using std::chrono::milliseconds;

TEST(Future, GivesWhatThePromiseGot) {
  const Promise<std::string> promise;
  const auto future = promise.future();
  EXPECT_FALSE(future.is_done());
  std::thread other([&] { promise.set_value("here"); });
  EXPECT_EQ(future.wait(), "here");
  other.join();
  EXPECT_FALSE(promise.set_value("late"));
  EXPECT_EQ(future.wait(), "here");
}

TEST(Future, ThrowsWhatItFailedWith) {
  const Promise<void> promise;
  promise.set_exception(std::make_exception_ptr(std::out_of_range("far")));
  EXPECT_THROW(promise.future().wait(), std::out_of_range);
}

TEST(Future, AWaitHasALimit) {
  const Promise<int> promise;
  EXPECT_THROW(promise.future().wait(milliseconds(1)), TimeoutError);
  promise.set_value(3);
  EXPECT_EQ(promise.future().wait(milliseconds(1)), 3);
}

TEST(Future, ThenPassesValuesAndFailuresOn) {
  const Promise<int> promise, broken;
  const auto twice = [](const Future<int>& future) { return 2 * future.wait(); };
  const auto before = promise.future().then(twice).then(twice);
  promise.set_value(5);
  EXPECT_EQ(before.wait(), 20);
  EXPECT_EQ(promise.future().then(twice).wait(), 10);
  broken.set_exception(std::make_exception_ptr(std::out_of_range("far")));
  EXPECT_THROW(broken.future().then(twice).then(twice).wait(), std::out_of_range);
}

TEST(Future, AllKeepsTheOrder) {
  const Promise<double> first, second;
  const auto all = when_all<double>({first.future(), second.future()});
  second.set_value(2);
  EXPECT_FALSE(all.is_done());
  first.set_value(1);
  EXPECT_EQ(all.wait(), (std::vector<double>{1, 2}));
  EXPECT_TRUE(when_all<double>({}).wait().empty());
}

TEST(Future, AllFailsWithTheFirst) {
  const Promise<double> first, second;
  const auto all = when_all<double>({first.future(), second.future()});
  second.set_exception(std::make_exception_ptr(std::out_of_range("far")));
  EXPECT_THROW(all.wait(), std::out_of_range);
}

TEST(Future, CancelEndsAllWaits) {
  const Promise<int> promise;
  const auto future = promise.future();
  const auto next = future.then([](const Future<int>& done) { return done.wait(); });
  EXPECT_TRUE(future.cancel());
  EXPECT_THROW(future.wait(), CancelledError);
  EXPECT_THROW(next.wait(), CancelledError);
  EXPECT_FALSE(future.cancel());
  EXPECT_FALSE(promise.set_value(1));
}

TEST(Future, FailsWhenAllPromisesAreGone) {
  std::optional<Promise<int>> promise(std::in_place);
  const auto future = promise->future();
  const auto next = future.then([](const auto& done) { return done.wait() + 1; });
  { const Promise<int> copy = *promise; }
  EXPECT_FALSE(future.is_done());
  promise.reset();
  EXPECT_THROW(future.wait(), CancelledError);
  EXPECT_THROW(next.wait(), CancelledError);
}

}  // namespace future_test
}  // namespace lockstep::rpc
