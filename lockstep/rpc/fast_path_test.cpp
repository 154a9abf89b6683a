// Small calls over shared memory and TCP between real processes.
#include "lockstep/rpc/fast_path.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <ctime>
#include <mutex>
#include <sstream>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/rpc/ring_link.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/rpc/rpc_worker.h"
#include "lockstep/rpc/socket_link.h"
#include "tests/support/run_workers.h"
#include "tests/support/test_wait.h"

namespace lockstep::rpc::detail {
namespace fast_path_test {

using namespace std::chrono_literals;
using test::run_workers;
using test_wait::wait_until;
using ::testing::HasSubstr;

FastPath* path() {
  return this_worker("a test")->fast_path();
}

/// Calls that go the fast way while `work` runs.
template <class F>
uint64_t fast_calls(const F& work) {
  const uint64_t before = path()->calls_sent();
  work();
  return path()->calls_sent() - before;
}

/// Over shared memory, or TCP.
class FastPaths : public ::testing::TestWithParam<bool> {
 protected:
  static void run(int count, const std::function<void(Agent& agent, int rank)>& body,
                  Options options = {}) {
    options.shared_memory = GetParam();
    run_workers(
        count,
        [&](Agent& agent, int rank) {
          EXPECT_EQ(dynamic_cast<RingLink*>(&path()->link()) != nullptr, GetParam());
          body(agent, rank);
        },
        options);
  }
};
INSTANTIATE_TEST_SUITE_P(All, FastPaths, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "memory" : "tcp"; });

/// All that a value is, as a text.
std::string described(const at::IValue& value) {
  std::ostringstream text;
  if (value.isTuple()) {
    text << "(";
    for (const auto& part : value.toTupleRef().elements()) text << described(part) << ", ";
    text << ")";
  } else if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    text << tensor.toString() << tensor.sizes() << tensor.strides() << tensor.storage_offset()
         << (tensor.requires_grad() ? " with gradients" : "") << (tensor.is_leaf() ? " leaf" : "")
         << tensor.storage().nbytes() << " bytes\n"
         << tensor;
  } else if (value.isString()) {
    for (const char c : value.toStringRef()) text << static_cast<int>(c) << " ";
  } else {
    text << value;
  }
  return value.tagKind() + " " + text.str();
}

Signature any_function(const char* name, const Handler& handler) {
  Signature signature = make_signature(name, "(any) -> any");
  register_function(signature, handler);
  return signature;
}
const auto echo = any_function("fast.echo", [](std::vector<at::IValue>& arguments) {
  return HandlerResult{make_tuple(arguments), nullptr};
});
const auto describe = any_function("fast.describe", [](std::vector<at::IValue>& arguments) {
  return HandlerResult{described(make_tuple(arguments)), nullptr};
});

struct Case {
  const char* name;
  std::vector<at::IValue> values;
  bool is_fast = true;
};

std::vector<Case> cases() {
  const at::Tensor matrix = at::arange(12, at::kFloat).view({3, 4});
  const at::Tensor leaf = at::ones({2}).requires_grad_();
  std::map<std::string, double> map{{"a", 1.5}, {"", -0.0}};
  return {
      {"nothing", {}},
      {"none", {at::IValue()}},
      {"undefined", {Value<at::Tensor>::to(at::Tensor())}},
      {"numbers",
       {true, false, 7, INT64_MIN, -0.0, 1e300, std::numeric_limits<double>::infinity()}},
      {"text", {std::string("a\0b\x01\xff", 5), ""}},
      {"scalar", {at::full({}, 3.5), at::full({}, 7, at::kLong)}},
      {"empty", {at::empty({0}), at::empty({3, 0, 2})}},
      {"types",
       {at::ones({2}, at::kBool), at::ones({2}, at::kByte), at::ones({2}, at::kChar),
        at::ones({2}, at::kShort), at::ones({2}, at::kInt), at::ones({2}, at::kHalf),
        at::ones({2}, at::kBFloat16), at::ones({2}, at::kDouble), at::ones({2}, at::kComplexFloat),
        at::ones({2}, at::kComplexDouble)}},
      {"transposed", {matrix.t()}, false},
      {"slice", {matrix.slice(1, 0, 4, 2)}, false},
      {"row", {matrix[2].clone()}},
      {"expanded", {at::ones({1, 3}).expand({4, 3})}, false},
      {"small part of a large one", {at::arange(100'000)[5000].view({1, 1})}},
      {"strided part of a large one", {at::arange(10'000).view({100, 100}).slice(1, 0, 20)}, false},
      {"shared", {matrix, matrix.t(), matrix[1]}, false},
      {"leaf", {leaf}},
      {"not a leaf", {leaf.mul(2)}},
      {"view of a leaf", {leaf[1].clone()}},
      {"nested", {make_tuple({1, make_tuple({"x", make_tuple({}), matrix})})}},
      {"map", {Value<std::map<std::string, double>>::to(map)}},
      {"optional", {Value<std::optional<int>>::to({}), Value<std::optional<int>>::to(4)}},
      {"list", {Value<std::vector<bool>>::to({true, false}), Value<std::vector<int>>::to({1, 2})}},
      {"64 KiB", {at::ones({16'384})}},
      {"too large", {at::ones({1 << 18})}, false},
      {"conjugated", {at::ones({2}, at::kComplexFloat).conj()}, false},
  };
}

TEST_P(FastPaths, AnswersAreNotOfTheModeOfTheThreadThatTakesThemOut) {
  run(2, [](Agent&, int rank) {
    if (rank != 0) return;
    const c10::InferenceMode mode;
    for (int i = 0; i < 20; ++i) {
      const at::IValue answer = send_call("w1", echo, {at::ones({2})})->value({});
      EXPECT_FALSE(answer.toTupleRef().elements()[0].toTensor().is_inference());
    }
  });
}

TEST_P(FastPaths, ValuesArriveAsTheyDoLibTorchsWay) {
  run(2, [](Agent&, int rank) {
    if (rank != 0) return;
    for (const auto& c : cases()) {
      SCOPED_TRACE(c.name);
      const auto there = [&](const Signature& function) {
        return send_call("w1", function, c.values)->value({});
      };
      const auto slowly = [&](const Signature& function) {
        return send_call_to(1, function, c.values)->value({});
      };
      at::IValue description, sent_back;
      const uint64_t fast = fast_calls([&] {
        description = there(describe);
        sent_back = there(echo);
      });
      EXPECT_EQ(fast, c.is_fast ? 2 : 0);
      EXPECT_EQ(description.toStringRef(), slowly(describe).toStringRef());
      EXPECT_EQ(described(sent_back), described(slowly(echo)));
    }
  });
}

std::mutex gate_mutex;
std::condition_variable gate_opened;
int waiting_at_gate = 0;
bool gate_open = false;
// Holds its thread, and waits for no worker.
const auto block = function("fast.block", [] {
  std::unique_lock lock(gate_mutex);
  ++waiting_at_gate;
  gate_opened.wait(lock, [] { return gate_open; });
});
const auto count_waiting = function("fast.count_waiting", [] {
  const std::lock_guard lock(gate_mutex);
  return waiting_at_gate;
});
const auto open_gate = function("fast.open_gate", [] {
  const std::lock_guard lock(gate_mutex);
  gate_open = true;
  gate_opened.notify_all();
});
const auto square = function("fast.square", [](int64_t number) { return number * number; });

// The thread that waits takes out all that comes, and may hold what a callback wants.
TEST_P(FastPaths, ACallbackMayWantALockThatAWaitingThreadHolds) {
  run(2, [](Agent&, int rank) {
    if (rank != 0) return;
    std::mutex mutex;
    std::atomic<bool> has_run{false};
    const auto gated = call_async("w1", block);
    const auto after = gated.then([&](const Future<void>&) {
      const std::lock_guard lock(mutex);
      has_run = true;
    });
    {
      const std::lock_guard lock(mutex);
      call("w1", open_gate);
      wait_until(
          [&] {
            call("w1", open_gate);
            return gated.is_done();
          },
          "the gate to be passed");
      EXPECT_FALSE(has_run);
    }
    after.wait(60s);
    EXPECT_TRUE(has_run);
  });
}

TEST_P(FastPaths, FunctionsThatBlockHoldNobodyUp) {
  run(2,
      [](Agent&, int rank) {
        if (rank != 0) return;
        std::vector<Future<void>> blocked;
        const uint64_t fast = fast_calls([&] {
          // More than there are threads, so no rule but that of stalls helps.
          for (int i = 1; i <= 5; ++i) {
            blocked.push_back(call_async("w1", block));
            wait_until([&] { return call("w1", count_waiting) == i; }, "the function");
            for (int n = 0; n < 20; ++n) ASSERT_EQ(call("w1", square, n), n * n);
          }
        });
        EXPECT_GE(fast, 5 * 22);
        call("w1", open_gate);
        when_all(blocked).wait();
      },
      {.threads = 2});
}

TEST_P(FastPaths, ManyThreadsOfManyWorkersCallAtOnce) {
  run(3, [](Agent& agent, int rank) {
    const auto call_others = [&](int64_t thread) {
      for (int64_t n = 0; n < 300; ++n) {
        const auto other = "w" + std::to_string((rank + 1 + (n + thread) % 2) % 3);
        EXPECT_EQ(call(other, square, n), n * n);
      }
    };
    const uint64_t fast = fast_calls([&] {
      std::vector<std::thread> threads;
      for (int64_t i = 0; i < 4; ++i) threads.emplace_back(call_others, i);
      for (auto& thread : threads) thread.join();
    });
    EXPECT_EQ(fast, 4 * 300);
    EXPECT_TRUE(agent.lost_workers().empty());
  });
}

TEST_P(FastPaths, AnswersComeAlsoWhenNobodyWaits) {
  run(2,
      [](Agent&, int rank) {
        if (rank != 0) return;
        std::atomic<int64_t> sum = 0;
        // Each call beyond the limit waits until others are answered, and waits for none.
        const uint64_t fast = fast_calls([&] {
          for (int64_t n = 0; n < 100; ++n) {
            call_async("w1", square, n).then([&](const Future<int64_t>& done) {
              sum += done.wait();
            });
          }
        });
        EXPECT_EQ(fast, 100);
        wait_until([&] { return sum == 328'350; }, "the sum of the squares below 100");
      },
      {.max_pending = 3});
}

double processor_seconds() {
  timespec used{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}
const auto processor_used = function("fast.processor_used", processor_seconds);
const auto take_time = function("fast.take_time", [](int64_t milliseconds) {
  std::unique_lock lock(gate_mutex);
  gate_opened.wait_for(lock, std::chrono::milliseconds(milliseconds), [] { return false; });
});

TEST_P(FastPaths, WhoWaitsForLongSleeps) {
  run(2,
      [](Agent&, int rank) {
        if (rank != 0) return;
        for (int i = 0; i < 100; ++i) call("w1", square, i);
        const double here = processor_seconds(), there = call("w1", processor_used);
        std::thread other([] { call("w1", take_time, 2'000); });
        call("w1", take_time, 2'000);
        other.join();
        EXPECT_LT(processor_seconds() - here, 0.5);
        EXPECT_LT(call("w1", processor_used) - there, 0.5);
      },
      {.poll = false});
}

const auto zeros = function("fast.zeros", [](int64_t size) { return at::zeros({size}); });
const auto make_ref = function("fast.make_ref", [] { return RRef<int>::own(5); });
const auto fail_long = function("fast.fail_long", [](int64_t size) -> int {
  throw std::out_of_range(std::string(static_cast<size_t>(size), 'x'));
});
const Promise<at::Tensor> late_result;
const auto late = function("fast.late", [] { return late_result.future(); });
const auto give_late =
    function("fast.give_late", [](int64_t size) { late_result.set_value(at::ones({size})); });

TEST_P(FastPaths, WhatDoesNotFitIsBrought) {
  run(2, [](Agent&, int rank) {
    if (rank != 0) return;
    EXPECT_EQ(fast_calls([] {
                EXPECT_EQ(call("w1", zeros, 1 << 20).numel(), 1 << 20);
                EXPECT_EQ(call("w1", make_ref).to_here(), 5);
                try {
                  call("w1", fail_long, 1 << 20);
                  FAIL();
                } catch (const RemoteError& error) {
                  EXPECT_EQ(error.type(), "std::out_of_range");
                  EXPECT_EQ(error.function(), "fast.fail_long");
                  EXPECT_EQ(error.message().size(), 1 << 20);
                }
              }),
              3);
  });
}

TEST_P(FastPaths, WhatNobodyWaitsForAnyMoreIsDropped) {
  run(2, [](Agent&, int rank) {
    if (rank != 0) return;
    const auto given_up = call_async("w1", late);
    EXPECT_THROW(call({"w1", 20ms}, late), TimeoutError);
    EXPECT_TRUE(given_up.cancel());
    const auto in_time = call_async("w1", late);
    call("w1", give_late, 1 << 20);
    EXPECT_EQ(in_time.wait().numel(), 1 << 20);
    EXPECT_THROW(given_up.wait(), CancelledError);
  });
}

/// Brings worker w0 the answer 7 to its call of that number, as worker `from` does.
const auto answer_as = function("fast.answer_as", [](int from, int64_t number) {
  const auto deliver = make_signature("lockstep.rpc.deliver", "(int32, int64, bool, any) -> None");
  send_call_to(0, deliver, {int64_t{from}, number, false, int64_t{7}})->value({});
});
const auto block_for = function("fast.block_for", []() -> int64_t {
  std::unique_lock lock(gate_mutex);
  gate_opened.wait(lock, [] { return gate_open; });
  return 8;
});

TEST_P(FastPaths, AnAnswerCountsFromTheWorkerThatWasCalled) {
  run(3, [](Agent&, int rank) {
    if (rank != 0) return;
    const auto blocked = call_async("w1", block_for);
    const auto number = static_cast<int64_t>(path()->calls_sent());
    call("w2", answer_as, 2, number);
    EXPECT_FALSE(blocked.is_done());
    call("w2", answer_as, 1, number + 100);
    EXPECT_FALSE(blocked.is_done());
    call("w2", answer_as, 1, number);
    EXPECT_EQ(blocked.wait(), 7);
    call("w1", open_gate);  // The real answer is late, and nobody waits for it.
    EXPECT_EQ(call("w1", square, 3), 9);
  });
}

const auto sum_of =
    function("fast.sum_of", [](const at::Tensor& x) { return x.sum().item<float>(); });

TEST_P(FastPaths, MoreThanTheRingsHoldArrives) {
  run(2, [](Agent&, int rank) {
    if (rank != 0) return;
    const at::Tensor large = at::ones({25'000});
    std::vector<Future<float>> sums;
    std::vector<Future<at::Tensor>> answers;
    const uint64_t fast = fast_calls([&] {
      for (int i = 0; i < 200; ++i) sums.push_back(call_async("w1", sum_of, large));
      for (int i = 0; i < 200; ++i) answers.push_back(call_async("w1", zeros, 25'000));
    });
    EXPECT_GT(fast, 200);
    for (const auto& sum : sums) ASSERT_EQ(sum.wait(), 25'000);
    for (const auto& answer : answers) ASSERT_EQ(answer.wait().numel(), 25'000);
  });
}

const auto die = function("fast.die", [] { ::_exit(0); });
const auto call_next =
    function("fast.call_next", [](const std::string& worker) { return call(worker, square, 3); });

TEST_P(FastPaths, ADeadWorkersCallsFailAtOnceAndOthersGoOn) {
  run(3,
      [](Agent& agent, int rank) {
        if (rank == 0) {
          const auto pending = call_async("w2", block);
          wait_until([] { return call("w2", count_waiting) == 1; }, "the function");
          EXPECT_THROW(call("w2", die), PeerLostError);
          try {
            pending.wait();
            FAIL();
          } catch (const PeerLostError& error) {
            EXPECT_THAT(error.what(),
                        HasSubstr("'fast.block' on worker 'w2': lost the worker (rank 2"));
          }
          EXPECT_THROW(call("w1", call_next, "w2"), RemoteError);
          EXPECT_EQ(fast_calls([] { EXPECT_EQ(call("w1", square, 3), 9); }), 1);
        }
        if (rank < 2) {
          wait_until([&] { return !agent.lost_workers().empty(); }, "the loss to be seen");
        }
      },
      {.timeout = 600s});
}

TEST(FastPath, WithASecretItTakesTcp) {
  run_workers(2,
              [](Agent&, int rank) {
                EXPECT_NE(dynamic_cast<SocketLink*>(&path()->link()), nullptr);
                if (rank == 0) {
                  EXPECT_EQ(fast_calls([] { EXPECT_EQ(call("w1", square, 4), 16); }), 1);
                }
              },
              {.secret = "sixteen letters!"});
}

TEST(FastPath, OneRanksWishTurnsItOffForAll) {
  spawn(
      [](int rank) {
        const World world = init(InitOptions{});
        Agent agent = rpc::init(world, "w" + std::to_string(rank), {.fast_calls = rank == 0});
        EXPECT_EQ(path(), nullptr);
        if (rank == 0) {
          EXPECT_EQ(call("w1", square, 4), 16);
        }
        agent.shutdown();
        if (::testing::Test::HasFailure()) throw std::runtime_error("an expectation failed");
      },
      2);
}

TEST_P(FastPaths, CallsInAnAutogradContextGoLibTorchsWay) {
  run(2, [](Agent&, int rank) {
    if (rank != 0) return;
    EXPECT_EQ(fast_calls([] {
                const AutogradContext context;
                EXPECT_EQ(call("w1", square, 4), 16);
              }),
              0);
  });
}

}  // namespace fast_path_test
}  // namespace lockstep::rpc::detail
