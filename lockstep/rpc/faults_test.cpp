#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/rpc/remote_failure.h"
#include "lockstep/rpc/rpc.h"
#include "tests/support/run_workers.h"
#include "tests/support/test_wait.h"

namespace lockstep::rpc {
namespace faults_test {

using namespace std::chrono_literals;
using test::run_workers;
using test_wait::wait_until;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::atomic<int> begun = 0;
const Promise<int> gate;
const auto square = function("square", [](int number) { return number * number; });
// Holds no thread while it is not answered.
const auto at_gate = function("at_gate", [] {
  ++begun;
  return gate.future();
});
const auto count_begun = function("count_begun", [] { return begun.load(); });
const auto open_gate = function("open_gate", [] { gate.set_value(1); });
const auto die = function("die", [] { ::_exit(0); });
const auto never_ends = function("never_ends", [] {
  for (;;) ::pause();
});
const auto call_gate_of =
    function("call_gate_of", [](const std::string& worker) { return call(worker, at_gate); });

template <class E, class T>
std::string error_of(const Future<T>& future) {
  try {
    future.wait(30s);
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "no such error";
  return {};
}

TEST(RpcFaults, ADeadWorkerFailsPendingCallsAtOnceAndHoldsNobodyUp) {
  // Without the detection each wait here would take these ten minutes.
  run_workers(3,
              [](Agent& agent, int rank) {
                if (rank == 0) {
                  const auto pending = call_async("w2", at_gate);
                  const auto nested = call_async("w1", call_gate_of, "w2");
                  wait_until([] { return call("w2", count_begun) == 2; }, "both calls at w2");
                  const auto reference = remote("w2", square, 3);
                  EXPECT_EQ(reference.to_here(), 9);
                  EXPECT_THAT(error_of<PeerLostError>(call_async("w2", die)),
                              HasSubstr("worker 'w2'"));
                  EXPECT_THAT(error_of<PeerLostError>(pending),
                              HasSubstr("'at_gate' on worker 'w2': lost the worker"));
                  EXPECT_THAT(error_of<RemoteError>(nested), HasSubstr("lockstep::PeerLostError"));
                  EXPECT_THROW(reference.to_here(), PeerLostError);
                  EXPECT_THROW(call("w2", square, 3), PeerLostError);
                  EXPECT_EQ(call("w1", square, 3), 9);
                }
                if (rank < 2) {
                  wait_until([&] { return !agent.lost_workers().empty(); }, "the loss to be seen");
                  EXPECT_THAT(agent.lost_workers(), ElementsAre("w2"));
                }
              },
              {.timeout = 600s});
}

TEST(RpcFaults, TensorPipesWordsForADeadWorkerMeanThatItIsLost) {
  for (const std::string words :
       {"pipe closed (this error originated at tensorpipe/core/pipe_impl.cc:356)",
        "eof (this error originated at tensorpipe/transport/shm/connection_impl.cc:259)",
        "process_vm_readv: No such process (this error originated at "
        "tensorpipe/channel/cma/context_impl.cc:60)"}) {
    const auto error = detail::decode_failure(std::make_exception_ptr(std::runtime_error(words)),
                                              "rpc: 'f' on worker 'w'", "");
    EXPECT_THROW(std::rethrow_exception(error), PeerLostError) << words;
  }
}

TEST(RpcFaults, ALateOrCancelledCallEndsAndTheNextWork) {
  run_workers(2,
              [](Agent&, int rank) {
                if (rank != 0) return;
                EXPECT_THAT(error_of<TimeoutError>(call_async({"w1", 20ms}, at_gate)),
                            HasSubstr("'at_gate' on worker 'w1': no answer within the time-out"));
                const auto given_up = call_async("w1", at_gate);
                EXPECT_TRUE(given_up.cancel());
                EXPECT_THROW(given_up.wait(), CancelledError);
                const auto waited_for = call_async("w1", at_gate);
                EXPECT_THROW(waited_for.wait(1ms), TimeoutError);
                EXPECT_EQ(call("w1", square, 4), 16);
                call("w1", open_gate);
                EXPECT_EQ(waited_for.wait(), 1);
              },
              {.timeout = 600s});
}

TEST(RpcFaults, AFunctionThatDoesNotEndIsLeftBehindAndNamed) {
  // Of two threads one runs functions of the transport, so both kinds of threads are stuck.
  run_workers(2,
              [](Agent& agent, int rank) {
                if (rank == 0) {
                  for (int i = 0; i < 2; ++i) {
                    EXPECT_THROW(call({"w1", 100ms}, never_ends), TimeoutError);
                  }
                  return;
                }
                try {
                  agent.shutdown();
                  FAIL() << "two functions run";
                } catch (const TimeoutError& error) {
                  EXPECT_THAT(error.what(), HasSubstr("worker 'w1' left while 'never_ends' still "
                                                      "ran there after 0.2 s"));
                }
              },
              {.timeout = 600s, .stop_timeout = 200ms, .threads = 2});
}

TEST(RpcFaults, WaitsForAValueThatIsNotMadeEnd) {
  run_workers(1,
              [](Agent&, int) {
                const auto later = remote({"w0", 60s}, at_gate);
                EXPECT_THROW(later.local_value(20ms), TimeoutError);
                EXPECT_THROW(later.to_here(20ms), TimeoutError);
                try {
                  later.local_value();
                  FAIL() << "nobody has made it";
                } catch (const TimeoutError& error) {
                  EXPECT_THAT(error.what(), HasSubstr("rpc: local_value: no value after 0.5 s"));
                }
                EXPECT_THROW(gate.future().wait(), TimeoutError);
                EXPECT_THROW(when_all(std::vector{gate.future()}).wait(), TimeoutError);
                gate.set_value(1);
                EXPECT_EQ(later.local_value(), 1);
                EXPECT_THROW(call({"w0", 0ms}, square, 1), UsageError);
                EXPECT_THROW(remote({"w0", 0ms}, square, 1), UsageError);
                EXPECT_THROW(later.to_here(0ms), UsageError);
              },
              {.timeout = 500ms});
}

TEST(RpcFaults, ACallBeyondTheLimitFailsInItsTime) {
  run_workers(2,
              [](Agent&, int rank) {
                if (rank != 0) return;
                const auto first = call_async("w1", at_gate);
                try {
                  call_async({"w1", 50ms}, square, 3);
                  FAIL() << "the limit is one call";
                } catch (const TimeoutError& error) {
                  EXPECT_THAT(error.what(), HasSubstr("1 calls of this worker were under way"));
                }
                EXPECT_TRUE(first.cancel());
                call("w1", open_gate);
              },
              {.max_pending = 1});
}

TEST(RpcFaults, TenThousandCallsAreUnderWayAtOnce) {
  constexpr int kCalls = 10'000;
  run_workers(2, [](Agent&, int rank) {
    if (rank != 0) return;
    std::vector<Future<int>> waiting, numbers;
    for (int i = 0; i < kCalls / 2; ++i) waiting.push_back(call_async("w1", at_gate));
    for (int i = 0; i < kCalls / 2; ++i) numbers.push_back(call_async("w1", square, i));
    for (int i = 0; i < kCalls / 2; ++i) {
      ASSERT_EQ(numbers[static_cast<size_t>(i)].wait(), i * i);
    }
    call("w1", open_gate);
    when_all(waiting).wait();
  });
}

}  // namespace faults_test
}  // namespace lockstep::rpc
