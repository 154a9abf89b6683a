// What the callbacks of a call's future may do: in ranks that are threads.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <thread>

#include "lockstep/base/error.h"
#include "tests/support/message_of.h"
#include "tests/support/run_shm.h"
#include "tests/support/test_wait.h"
#include "tests/support/whole_numbers.h"

namespace lockstep::shm {
namespace shm_callbacks_test {

using test::expect_ok;
using test::expect_same;
using test::run_shm;
using test_wait::wait_until;
using Tensors = std::vector<at::Tensor>;

TEST(ShmCallbacks, AGroupCanBeUsedFromACallback) {
  expect_ok(run_shm(2, [](int rank, c10d::Backend& shm, const auto&) {
    Tensors first{at::ones({100'000})}, second{at::ones({3})};
    auto work = shm.allreduce(first, {});
    auto after = work->getFuture()->then(
        [&](c10::ivalue::Future&) {
          c10d::AllreduceOptions options;
          options.asyncOp = false;
          shm.allreduce(second, options)->wait();
          return c10::IValue(1);
        },
        c10::IntType::get());
    after->wait();
    expect_same(second[0], at::full({3}, 2.0), "second");
  }));
}

/// A callback of a collective waits for another one, `begun_before` it or in it.
class Collectives {
 public:
  Collectives(bool by_future, bool begun_before)
      : by_future_(by_future), begun_before_(begun_before) {}
  void run(int rank, c10d::Backend& shm) {
    for (int round = 0; round < kRounds; ++round) {
      Tensors first{at::ones({100'000})}, second{at::ones({3})};
      // This rank is late: the other one's call is left to the thread.
      std::atomic<bool>& begun = begun_[static_cast<size_t>(round)];
      if (round % 2 == rank) wait_until([&] { return begun.load(); }, "the other rank");
      auto work = shm.allreduce(first, {});
      auto other = begun_before_ ? shm.allreduce(second, {}) : nullptr;
      auto after = work->getFuture()->then(
          [&](c10::ivalue::Future&) {
            auto inner = begun_before_ ? other : shm.allreduce(second, {});
            by_future_ ? inner->getFuture()->wait() : void(inner->wait());
            return c10::IValue(1);
          },
          c10::IntType::get());
      begun = true;
      after->waitAndThrow();
      expect_same(second[0], at::full({3}, 2.0), "second");
    }
  }

 private:
  static constexpr int kRounds = 40;
  const bool by_future_, begun_before_;
  std::array<std::atomic<bool>, kRounds> begun_{};  ///< By any rank.
};

// As PowerSGD's hook does: what a callback waits for goes on in another thread than its own.
TEST(ShmCallbacks, ACallbackMayWaitForAnAsynchronousCall) {
  for (const bool by_future : {false, true}) {
    for (const bool begun_before : {false, true}) {
      Collectives test(by_future, begun_before);
      expect_ok(
          run_shm(2, [&](int rank, c10d::Backend& shm, const auto&) { test.run(rank, shm); }));
    }
  }
}

TEST(ShmCallbacks, AGroupMayBeClosedFromACallback) {
  std::atomic<int> begun{0};
  expect_ok(run_shm(2, [&](int rank, c10d::Backend& shm, const auto&) {
    Tensors first{at::ones({100'000})};
    if (rank == 1) wait_until([&] { return begun == 1; }, "the other rank");
    auto work = shm.allreduce(first, {});
    auto after = work->getFuture()->then(
        [&](c10::ivalue::Future&) {
          shm.shutdown();
          return c10::IValue(1);
        },
        c10::IntType::get());
    begun = 1;
    after->waitAndThrow();
    EXPECT_THROW(shm.allreduce(first, {})->wait(), CommError);
  }));
}

/// A callback of a receive waits for another one: begun before it or in it, by its work or its
/// future. It comes when the callback runs already, or with the first.
class Receives {
 public:
  explicit Receives(int way)
      : by_future_(way & 1), begun_before_(way & 2), comes_late_(way & 4), waits_(way & 8) {}
  static constexpr int kWays = 16;
  void run(int rank, c10d::Backend& shm) {
    // A receive of other elements than plain ones has work to do at its end, too.
    const at::Tensor wide = at::zeros({2, 3}).t();
    Tensors first{wide}, second{at::zeros({by_future_ ? 3 : 100'000})};
    if (rank == 0) {
      Tensors ones{at::ones({3, 2})}, twos{at::full_like(second[0], 2)};
      shm.send(ones, 1, 1)->wait();
      if (comes_late_) wait_until([&] { return runs_.load(); }, "the callback");
      shm.send(twos, 1, 2)->wait();
      return;
    }
    auto work = shm.recv(first, 0, 1);
    auto other = begun_before_ ? shm.recv(second, 0, 2) : nullptr;
    auto after = work->getFuture()->then(
        [&](c10::ivalue::Future&) {
          runs_ = true;
          auto inner = begun_before_ ? other : shm.recv(second, 0, 2);
          by_future_ ? inner->getFuture()->waitAndThrow() : void(inner->wait());
          return c10::IValue(1);
        },
        c10::IntType::get());
    if (waits_) work->wait();
    after->waitAndThrow();
    expect_same(wide, at::ones({3, 2}), "first");
    expect_same(second[0], at::full_like(second[0], 2), "second");
  }

 private:
  const bool by_future_, begun_before_, comes_late_, waits_;
  std::atomic<bool> runs_{false};
};

TEST(ShmCallbacks, ACallbackOfAMessageMayWaitForAnother) {
  for (int way = 0; way < Receives::kWays; ++way) {
    Receives test(way);
    expect_ok(run_shm(2, [&](int rank, c10d::Backend& shm, const auto&) { test.run(rank, shm); }));
  }
}

TEST(ShmCallbacks, AGroupMayBeClosedFromACallbackOfAMessage) {
  for (const bool waits : {false, true}) {
    expect_ok(run_shm(2, [&](int rank, c10d::Backend& shm, const auto&) {
      Tensors tensors{at::ones({3})};
      if (rank == 0) return void(shm.send(tensors, 1, 1)->wait());
      auto work = shm.recv(tensors, 0, 1);
      auto after = work->getFuture()->then(
          [&](c10::ivalue::Future&) {
            shm.shutdown();
            return c10::IValue(1);
          },
          c10::IntType::get());
      if (waits) work->wait();
      after->waitAndThrow();
      EXPECT_THROW(shm.recv(tensors, 0, 1)->wait(), CommError);
    }));
  }
}

// Whose threads have started, and are not this one.
TEST(ShmCallbacks, ACallbackMayDestroyAnotherGroup) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::barrier together(2);
  expect_ok(run_shm(2, [&](int rank, c10d::Backend& shm, const auto&) {
    auto other = c10::make_intrusive<ShmBackend>(test::shm_options(
        c10::make_intrusive<c10d::PrefixStore>("other", store), rank, 2, std::chrono::seconds(20)));
    Tensors first{at::ones({3})}, second{at::ones({3})}, never{at::ones({3})};
    const auto unmet = other->recv(never, 1 - rank, 1);
    other->allreduce(first, {})->wait();
    const auto work = shm.recv(second, 1 - rank, 2);
    auto after = work->getFuture()->then(
        [&](c10::ivalue::Future&) {
          other.reset();
          return c10::IValue(1);
        },
        c10::IntType::get());
    together.arrive_and_wait();  // Now the callback runs where the message ends.
    shm.send(first, 1 - rank, 2)->wait();
    after->waitAndThrow();
    EXPECT_THROW(unmet->wait(), CommError);
  }));
}

}  // namespace shm_callbacks_test
}  // namespace lockstep::shm
