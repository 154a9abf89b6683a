#include "lockstep/comm/checks/checked_backend.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "tests/support/run_backends.h"
#include "tests/support/test_wait.h"

namespace lockstep {
namespace checked_backend_test {

using c10d::Backend;
using c10d::ReduceOp;
using test::expect_ok;
using test::Outcome;
using test::run_gloo;
using test::tells;
using test_wait::wait_until;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using Part = std::function<void(int, Backend&)>;

CheckedBackendOptions quick(DebugLevel debug = DebugLevel::info) {
  CheckedBackendOptions options;
  options.debug = debug;
  options.timeout = std::chrono::milliseconds(20'000);
  return options;
}

/// Long enough for a busy machine to bring all threads to the call, short for a test that waits it.
constexpr std::chrono::milliseconds kShort{700};

at::Tensor filled(int64_t n, double value) {
  return at::full({n}, value);
}

void all_reduce(Backend& backend, at::Tensor tensor, ReduceOp::RedOpType op = ReduceOp::SUM) {
  Tensors tensors{std::move(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  backend.allreduce(tensors, options)->wait();
}

void broadcast(Backend& backend, at::Tensor tensor, int root) {
  Tensors tensors{std::move(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  backend.broadcast(tensors, options)->wait();
}

void all_to_all_single(Backend& backend, at::Tensor output, at::Tensor input,
                       std::vector<int64_t> output_splits, std::vector<int64_t> input_splits) {
  backend.alltoall_base(output, input, output_splits, input_splits, {})->wait();
}

/// Every rank must get a MismatchError with all of `texts`.
void expect_mismatch(const Part& part, const std::vector<std::string>& texts, int size = 2) {
  const auto outcomes = run_gloo(size, quick(), part);
  for (const Outcome& outcome : outcomes) {
    EXPECT_TRUE(outcome.is<MismatchError>()) << outcome.text();
    for (const auto& text : texts) EXPECT_THAT(outcome.text(), HasSubstr(text));
  }
}

TEST(CheckedBackendMismatch, Operation) {
  expect_mismatch(
      [](int rank, Backend& backend) {
        all_reduce(backend, at::ones({2}));
        if (rank == 0) {
          all_reduce(backend, at::ones({3, 4}));
        } else {
          broadcast(backend, at::ones({3, 4}), 0);
        }
      },
      {"rank 0 called all_reduce(sum) of float32 [3, 4] as collective 2 of group 'default', but "
       "rank 1 called broadcast(root 0) of float32 [3, 4]"});
}

TEST(CheckedBackendMismatch, Dtype) {
  expect_mismatch(
      [](int rank, Backend& backend) {
        all_reduce(backend, at::ones({3}, rank ? at::kDouble : at::kFloat));
      },
      {"of float32 [3]", "rank 1 called all_reduce(sum) of float64 [3]"});
}

TEST(CheckedBackendMismatch, ShapeNamesTheOddRankAmongThree) {
  expect_mismatch(
      [](int rank, Backend& backend) { all_reduce(backend, at::ones({rank == 1 ? 5 : 4})); },
      {"ranks 0 and 2 called all_reduce(sum) of float32 [4]", "but rank 1 called", "float32 [5]"},
      3);
}

TEST(CheckedBackendMismatch, Reduction) {
  expect_mismatch(
      [](int rank, Backend& backend) {
        all_reduce(backend, at::ones({3}), rank ? ReduceOp::MAX : ReduceOp::SUM);
      },
      {"all_reduce(sum)", "rank 1 called all_reduce(max)"});
}

TEST(CheckedBackendMismatch, Root) {
  expect_mismatch([](int rank, Backend& backend) { broadcast(backend, at::ones({3}), rank); },
                  {"broadcast(root 0)", "rank 1 called broadcast(root 1)"});
}

TEST(CheckedBackendMismatch, ReduceRootAndReduction) {
  expect_mismatch(
      [](int rank, Backend& backend) {
        Tensors tensors{at::ones({3})};
        c10d::ReduceOptions options;
        options.rootRank = rank;
        options.reduceOp = rank ? ReduceOp::MIN : ReduceOp::SUM;
        backend.reduce(tensors, options)->wait();
      },
      {"reduce(sum, root 0)", "rank 1 called reduce(min, root 1)"});
}

TEST(CheckedBackendMismatch, AllReduceCoalesced) {
  expect_mismatch(
      [](int rank, Backend& backend) {
        Tensors tensors{at::ones({3}), at::ones({rank ? 6 : 5})};
        backend.allreduce_coalesced(tensors, {})->wait();
      },
      {"all_reduce_coalesced(sum) of (float32 [3], float32 [5])", "(float32 [3], float32 [6])"});
}

TEST(CheckedBackendMismatch, AllGatherShape) {
  expect_mismatch(
      [](int rank, Backend& backend) {
        const int64_t n = rank ? 3 : 2;
        TensorLists outputs{{at::zeros({n}), at::zeros({n})}};
        Tensors inputs{at::ones({n})};
        backend.allgather(outputs, inputs, {})->wait();
      },
      {"all_gather of float32 [2] into 2 x float32 [2]",
       "rank 1 called all_gather of float32 [3]"});
}

TEST(CheckedBackendMismatch, AllGatherIntoTensorDtype) {
  expect_mismatch(
      [](int rank, Backend& backend) {
        const auto dtype = rank ? at::kInt : at::kLong;
        auto output = at::zeros({4}, dtype);
        auto input = at::ones({2}, dtype);
        backend._allgather_base(output, input, {})->wait();
      },
      {"all_gather_into_tensor of int64 [2]", "int32 [2]"});
}

TEST(CheckedBackendMismatch, Gather) {
  expect_mismatch(
      [](int rank, Backend& backend) {
        TensorLists outputs;
        if (rank == 0) outputs = {{at::zeros({2}), at::zeros({2})}};
        Tensors inputs{at::ones({rank ? 3 : 2})};
        backend.gather(outputs, inputs, {})->wait();
      },
      {"gather(root 0) of float32 [2]", "rank 1 called gather(root 0) of float32 [3]"});
}

TEST(CheckedBackendMismatch, Scatter) {
  expect_mismatch(
      [](int rank, Backend& backend) {
        TensorLists inputs;
        if (rank == 0) inputs = {{at::zeros({2}), at::zeros({2})}};
        Tensors outputs{at::ones({rank ? 3 : 2})};
        backend.scatter(outputs, inputs, {})->wait();
      },
      {"rank 0 called scatter(root 0)", "into float32 [2]", "into float32 [3]"});
}

TEST(CheckedBackendMismatch, ReduceScatter) {
  expect_mismatch(
      [](int rank, Backend& backend) {
        const int64_t n = rank ? 3 : 2;
        TensorLists inputs{{at::zeros({n}), at::zeros({n})}};
        Tensors outputs{at::ones({n})};
        backend.reduce_scatter(outputs, inputs, {})->wait();
      },
      {"reduce_scatter(sum) of 2 x float32 [2]", "reduce_scatter(sum) of 2 x float32 [3]"});
}

TEST(CheckedBackendMismatch, ReduceScatterTensorReduction) {
  expect_mismatch(
      [](int rank, Backend& backend) {
        auto input = at::ones({4});
        auto output = at::ones({2});
        c10d::ReduceScatterOptions options;
        options.reduceOp = rank ? ReduceOp::PRODUCT : ReduceOp::SUM;
        backend._reduce_scatter_base(output, input, options)->wait();
      },
      {"reduce_scatter_tensor(sum)", "reduce_scatter_tensor(product)"});
}

TEST(CheckedBackendMismatch, AllToAllSingleSplits) {
  expect_mismatch(
      [](int rank, Backend& backend) {
        // Rank 0 sends one row to rank 1, which expects two.
        if (rank == 0) {
          all_to_all_single(backend, at::zeros({4}), at::ones({4}), {3, 1}, {3, 1});
        } else {
          all_to_all_single(backend, at::zeros({4}), at::ones({4}), {2, 2}, {1, 3});
        }
      },
      {"input splits [3, 1], output splits [3, 1]", "gives rank 1 float32 [1]",
       "input splits [1, 3], output splits [2, 2]", "expects float32 [2]"});
}

TEST(CheckedBackendMismatch, AllToAllSingleEvenAgainstSplits) {
  expect_mismatch(
      [](int rank, Backend& backend) {
        if (rank == 0) {
          all_to_all_single(backend, at::zeros({4}), at::ones({4}), {}, {});
        } else {
          all_to_all_single(backend, at::zeros({4}), at::ones({4}), {1, 3}, {1, 3});
        }
      },
      {"all_to_all_single", "gives rank 1 float32 [2]", "expects float32 [1]"});
}

TEST(CheckedBackendMismatch, Barrier) {
  expect_mismatch(
      [](int rank, Backend& backend) {
        if (rank == 0) {
          backend.barrier({})->wait();
        } else {
          all_reduce(backend, at::ones({1}));
        }
      },
      {"rank 0 called barrier as collective 1", "rank 1 called all_reduce(sum)"});
}

TEST(CheckedBackendMismatch, NamesRanksOfTheDefaultGroup) {
  auto options = quick();
  options.global_ranks = {4, 7};
  options.group_name = "right";
  const auto outcomes = run_gloo(
      2, options, [](int rank, Backend& backend) { broadcast(backend, at::ones({1}), rank); });
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(outcome.is<MismatchError>());
    EXPECT_THAT(outcome.text(),
                HasSubstr("rank 4 called broadcast(root 4) of float32 [1] as collective 1 of group "
                          "'right', but rank 7 called broadcast(root 7)"));
  }
}

TEST(CheckedBackendMismatch, GroupGoesOnAfterOne) {
  const auto outcomes = run_gloo(2, quick(), [](int rank, Backend& backend) {
    EXPECT_THROW(all_reduce(backend, at::ones({2 + rank})), MismatchError);
    auto tensor = at::ones({2});
    all_reduce(backend, tensor);
    EXPECT_TRUE(tensor.equal(filled(2, 2)));
  });
  expect_ok(outcomes);
}

void expect_mismatch_at_fifth_call(const c10::intrusive_ptr<c10d::Store>& store) {
  expect_ok(run_gloo(
      3, quick(),
      [](int rank, Backend& backend) {
        for (int i = 0; i < 4; ++i) all_reduce(backend, at::ones({2}));
        EXPECT_THROW(all_reduce(backend, at::ones({rank == 2 ? 3 : 2})), MismatchError);
      },
      store));
}

TEST(CheckedBackendMismatch, OverTcp) {
  c10d::TCPStoreOptions server;
  server.port = 0;
  server.isServer = true;
  server.waitWorkers = false;
  auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", server);
  expect_mismatch_at_fifth_call(store);
}

TEST(CheckedBackendMismatch, OverAFile) {
  const TemporaryDirectory folder;
  auto store =
      c10::make_intrusive<c10d::FileStore>((folder.path() / "store").string(), /*numWorkers=*/-1);
  expect_mismatch_at_fifth_call(store);
}

TEST(CheckedBackendMissing, TimesOutNamingWhoDidNotCome) {
  auto options = quick();
  options.timeout = kShort;
  std::atomic<int> waiting{2};
  const auto outcomes = run_gloo(3, options, [&](int rank, Backend& backend) {
    broadcast(backend, at::ones({2}), 0);
    if (rank == 1) {
      wait_until([&] { return waiting == 0; }, "ranks 0 and 2 to give up");
      return;
    }
    try {
      all_reduce(backend, at::ones({3}));
    } catch (...) {
      --waiting;
      throw;
    }
  });
  for (int rank : {0, 2}) {
    const auto& outcome = outcomes[static_cast<size_t>(rank)];
    EXPECT_TRUE(outcome.is<TimeoutError>()) << outcome.text();
    EXPECT_TRUE(tells(outcome.failure(), Failure::Kind::late, 1));
    EXPECT_THAT(outcome.text(), HasSubstr("rank 1 did not come (its last was broadcast(root 0) of "
                                          "float32 [2], collective 1)"));
  }
}

TEST(CheckedBackendMissing, AfterItEveryComparisonFails) {
  auto options = quick();
  options.timeout = kShort;
  std::atomic<bool> gave_up{false};
  const auto outcomes = run_gloo(2, options, [&](int rank, Backend& backend) {
    if (rank == 1) return wait_until([&] { return gave_up.load(); }, "rank 0 to give up");
    EXPECT_THROW(backend.barrier({}), TimeoutError);
    gave_up = true;
    backend.barrier({});
  });
  EXPECT_TRUE(outcomes[0].is<TimeoutError>()) << outcomes[0].text();
  EXPECT_TRUE(tells(outcomes[0].failure(), Failure::Kind::late, 1));
}

// Its process lives on, so nothing else tells it but the store.
TEST(CheckedBackendMissing, WhoHasLeftTheGroupIsNotWaitedFor) {
  for (const bool aborts : {true, false}) {
    std::atomic<bool> is_over{false};
    const auto outcomes = run_gloo(2, quick(), [&](int rank, Backend& backend) {
      if (rank == 1) {
        aborts ? backend.abort() : backend.shutdown();
        return wait_until([&] { return is_over.load(); }, "rank 0 to notice");
      }
      const auto end = c10::make_scope_exit([&] { is_over = true; });
      all_reduce(backend, at::zeros({2}));
    });
    EXPECT_TRUE(outcomes[0].is<PeerLostError>()) << outcomes[0].text();
    const auto kind = aborts ? Failure::Kind::gave_up : Failure::Kind::closed;
    EXPECT_TRUE(tells(outcomes[0].failure(), kind, 1)) << outcomes[0].text();
  }
}

}  // namespace checked_backend_test
}  // namespace lockstep
