#include "lockstep/comm/process_group.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <nlohmann/json.hpp>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lockstep/base/error.h"
#include "tests/support/message_of.h"
#include "tests/support/run_group.h"

namespace lockstep {
namespace process_group_test {

using std::chrono::milliseconds;
using test::RankOptions;
using test::run_group;

using Tensors = std::vector<at::Tensor>;

class OfSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, OfSize, ::testing::Values(1, 2, 3));

/// Rank `rank`'s own tensor of whole numbers, so that any order of summation gives the same bits.
at::Tensor own(int rank, int64_t size = 7, at::ScalarType dtype = at::kFloat) {
  return (at::arange(size, at::kLong) % 5 + rank + 1).to(dtype);
}

void expect_equal(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_TRUE(at::equal(actual, expected)) << actual << "\nexpected\n" << expected;
}

at::Tensor sum_of_all(int size, int64_t length = 7, at::ScalarType dtype = at::kFloat) {
  at::Tensor sum = at::zeros({length}, dtype);
  for (int rank = 0; rank < size; ++rank) sum += own(rank, length, dtype);
  return sum;
}

TEST_P(OfSize, AllReduceSums) {
  run_group(GetParam(), [](ProcessGroup group) {
    EXPECT_EQ(group.backend(), "gloo");
    at::Tensor tensor = own(group.rank());
    group.all_reduce(tensor);
    expect_equal(tensor, sum_of_all(group.size()));
    at::Tensor scalar = at::tensor(group.rank() + 1.0);
    group.all_reduce(scalar);
    EXPECT_EQ(scalar.item<double>(), group.size() * (group.size() + 1) / 2.0);
  });
}

TEST_P(OfSize, EveryReduction) {
  run_group(GetParam(), [](ProcessGroup group) {
    const int size = group.size();
    const auto reduce = [&](ReduceOp op, at::ScalarType dtype) {
      at::Tensor tensor = own(group.rank(), 7, dtype);
      group.all_reduce(tensor, op);
      return tensor;
    };
    const auto fold = [&](at::ScalarType dtype, auto&& combine) {
      at::Tensor result = own(0, 7, dtype);
      for (int rank = 1; rank < size; ++rank) result = combine(result, own(rank, 7, dtype));
      return result;
    };
    const auto f = at::kFloat;
    const auto i = at::kInt;
    expect_equal(reduce(ReduceOp::avg, f), sum_of_all(size) / size);
    expect_equal(reduce(ReduceOp::product, f), fold(f, [](auto a, auto b) { return a * b; }));
    expect_equal(reduce(ReduceOp::min, f), fold(f, [](auto a, auto b) { return minimum(a, b); }));
    expect_equal(reduce(ReduceOp::max, f), fold(f, [](auto a, auto b) { return maximum(a, b); }));
    expect_equal(reduce(ReduceOp::band, i), fold(i, [](auto a, auto b) { return a & b; }));
    expect_equal(reduce(ReduceOp::bor, i), fold(i, [](auto a, auto b) { return a | b; }));
    expect_equal(reduce(ReduceOp::bxor, i), fold(i, [](auto a, auto b) { return a ^ b; }));
  });
}

TEST_P(OfSize, EveryDtype) {
  run_group(GetParam(), [](ProcessGroup group) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte,
                             at::kChar, at::kInt, at::kLong, at::kComplexFloat}) {
      at::Tensor tensor = own(group.rank(), 7, dtype);
      group.all_reduce(tensor);
      expect_equal(tensor, sum_of_all(group.size(), 7, dtype));
      at::Tensor shared = own(group.rank(), 7, dtype);
      group.broadcast(shared, group.size() - 1);
      expect_equal(shared, own(group.size() - 1, 7, dtype));
    }
    at::Tensor any = at::tensor({group.rank() == 0 ? 1 : 0, 0}).to(at::kBool);
    group.all_reduce(any, ReduceOp::max);
    expect_equal(any, at::tensor({1, 0}).to(at::kBool));
  });
}

TEST_P(OfSize, AllReduceCoalesced) {
  run_group(GetParam(), [](ProcessGroup group) {
    Tensors tensors{own(group.rank(), 3), own(group.rank(), 5)};
    group.all_reduce_coalesced(tensors);
    expect_equal(tensors[0], sum_of_all(group.size(), 3));
    expect_equal(tensors[1], sum_of_all(group.size(), 5));
  });
}

TEST_P(OfSize, ReduceBroadcastFromEveryRoot) {
  run_group(GetParam(), [](ProcessGroup group) {
    for (int root = 0; root < group.size(); ++root) {
      at::Tensor tensor = own(group.rank());
      group.reduce(tensor, root);
      if (group.rank() == root) expect_equal(tensor, sum_of_all(group.size()));
      at::Tensor shared = own(group.rank());
      group.broadcast(shared, root);
      expect_equal(shared, own(root));
    }
  });
}

TEST_P(OfSize, AllGather) {
  run_group(GetParam(), [](ProcessGroup group) {
    Tensors outputs;
    for (int i = 0; i < group.size(); ++i) outputs.push_back(at::empty({7}));
    group.all_gather(outputs, own(group.rank()));
    at::Tensor flat = at::empty({7 * group.size()});
    group.all_gather_into_tensor(flat, own(group.rank()));
    for (int i = 0; i < group.size(); ++i) {
      expect_equal(outputs[static_cast<size_t>(i)], own(i));
      expect_equal(flat.narrow(0, 7 * i, 7), own(i));
    }
  });
}

TEST_P(OfSize, GatherAndScatter) {
  run_group(GetParam(), [](ProcessGroup group) {
    const int root = group.size() - 1;
    Tensors gathered, parts;
    if (group.rank() == root) {
      for (int i = 0; i < group.size(); ++i) {
        gathered.push_back(at::empty({7}));
        parts.push_back(own(i + 20));
      }
    }
    group.gather(gathered, own(group.rank()), root);
    for (size_t i = 0; i < gathered.size(); ++i)
      expect_equal(gathered[i], own(static_cast<int>(i)));
    at::Tensor part = at::empty({7});
    group.scatter(part, parts, root);
    expect_equal(part, own(group.rank() + 20));
  });
}

TEST_P(OfSize, ReduceScatter) {
  run_group(GetParam(), [](ProcessGroup group) {
    const int size = group.size();
    at::Tensor output = at::empty({4});
    group.reduce_scatter_tensor(output, own(group.rank(), 4 * size));
    expect_equal(output, sum_of_all(size, 4 * size).narrow(0, 4 * group.rank(), 4));
    Tensors inputs;
    for (int i = 0; i < size; ++i) inputs.push_back(own(group.rank() + 10 * i));
    at::Tensor mine = at::empty({7});
    group.reduce_scatter(mine, inputs);
    at::Tensor expected = at::zeros({7});
    for (int rank = 0; rank < size; ++rank) expected += own(rank + 10 * group.rank());
    expect_equal(mine, expected);
  });
}

TEST_P(OfSize, AllToAll) {
  run_group(GetParam(), [](ProcessGroup group) {
    const int size = group.size(), rank = group.rank();
    Tensors outputs, inputs;
    for (int i = 0; i < size; ++i) {
      outputs.push_back(at::empty({7}));
      inputs.push_back(own(100 * rank + i));
    }
    group.all_to_all(outputs, inputs);
    for (int i = 0; i < size; ++i)
      expect_equal(outputs[static_cast<size_t>(i)], own(100 * i + rank));
    at::Tensor even = at::empty({2 * size});
    group.all_to_all_single(even, at::arange(2 * size, at::kFloat) + 100 * rank);
    for (int i = 0; i < size; ++i) {
      expect_equal(even.narrow(0, 2 * i, 2), at::arange(2, at::kFloat) + 2 * rank + 100 * i);
    }
  });
}

TEST_P(OfSize, AllToAllWithSplits) {
  run_group(GetParam(), [](ProcessGroup group) {
    const int size = group.size(), rank = group.rank();
    // Rank i sends j + 1 rows to rank j, so rank j gets j + 1 rows from each.
    std::vector<int64_t> in_splits, out_splits(static_cast<size_t>(size), rank + 1);
    for (int j = 0; j < size; ++j) in_splits.push_back(j + 1);
    const at::Tensor input = at::full({size * (size + 1) / 2, 2}, static_cast<double>(rank));
    at::Tensor output = at::empty({size * (rank + 1), 2});
    group.all_to_all_single(output, input, out_splits, in_splits);
    for (int i = 0; i < size; ++i) {
      expect_equal(output.narrow(0, i * (rank + 1), rank + 1),
                   at::full({rank + 1, 2}, static_cast<double>(i)));
    }
  });
}

TEST_P(OfSize, Barrier) {
  std::atomic<int> arrived{0};
  run_group(GetParam(), [&](ProcessGroup group) {
    ++arrived;
    group.barrier();
    EXPECT_EQ(arrived, group.size());
    group.monitored_barrier(milliseconds(20'000));
    group.monitored_barrier(milliseconds(20'000));
    group.monitored_barrier(milliseconds(20'000));
  });
}

TEST(MonitoredBarrier, NamesWhoDidNotCome) {
  std::promise<void> over;
  auto wait_over = over.get_future().share();
  std::atomic<int> left{2};
  run_group(4, [&](ProcessGroup group) {
    group.monitored_barrier(milliseconds(20'000));
    if (group.rank() % 2 == 1) return wait_over.wait();
    try {
      group.monitored_barrier(milliseconds(200));
      ADD_FAILURE() << "nobody was missed";
    } catch (const TimeoutError& error) {
      EXPECT_EQ(error.ranks(), (std::vector<int>{1, 3}));
    }
    if (--left == 0) over.set_value();
  });
}

// Each rank comes early to one of the groups and late to the other, which share its connection to
// the store.
TEST(MonitoredBarrier, OfTwoGroupsInTwoThreadsDoesNotLockUp) {
  TcpStoreOptions listener;
  listener.is_listener = true;
  RankOptions options;
  options.store = tcp_store(listener);
  run_group(
      2,
      [](ProcessGroup first) {
        const ProcessGroup second(
            form_group(impl_of(first).context, "1", first.global_ranks(), first.backend()));
        const auto& early = first.rank() == 0 ? first : second;
        const auto& late = first.rank() == 0 ? second : first;
        const auto start = std::chrono::steady_clock::now();
        std::thread waiting(
            [&] { EXPECT_NO_THROW(early.monitored_barrier(milliseconds(10'000))); });
        // So long that the other thread is surely within its wait.
        Store store = impl_of(first).context->own_store;
        while (std::chrono::steady_clock::now() - start < milliseconds(50)) store.check({"other"});
        EXPECT_NO_THROW(late.monitored_barrier(milliseconds(10'000)));
        waiting.join();
        EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(5'000));
      },
      options);
}

TEST_P(OfSize, AsyncWithWaitAndCallback) {
  run_group(GetParam(), [](ProcessGroup group) {
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    std::promise<std::exception_ptr> called;
    for (int i = 0; i < 5; ++i) {
      tensors.push_back(own(group.rank() + i));
      works.push_back(group.all_reduce_async(tensors.back()));
    }
    works.front().then([&](std::exception_ptr error) { called.set_value(error); });
    for (auto& work : works) work.wait();
    EXPECT_EQ(called.get_future().get(), nullptr);
    for (int i = 0; i < 5; ++i) {
      EXPECT_TRUE(works[static_cast<size_t>(i)].is_completed());
      expect_equal(works[static_cast<size_t>(i)].result().at(0),
                   sum_of_all(group.size()) + i * group.size());
    }
    bool at_once = false;
    works.back().then([&](std::exception_ptr error) { at_once = error == nullptr; });
    EXPECT_TRUE(at_once);
  });
}

TEST(PointToPoint, SendsInARing) {
  run_group(3, [](ProcessGroup group) {
    const int next = (group.rank() + 1) % 3, previous = (group.rank() + 2) % 3;
    const at::Tensor mine = own(group.rank());
    at::Tensor taken = at::empty({7});
    const Work sending = group.isend(mine, next, 3);
    group.recv(taken, previous, 3);
    sending.wait();
    expect_equal(taken, own(previous));
  });
}

TEST(PointToPoint, ReceivesFromAny) {
  run_group(3, [](ProcessGroup group) {
    if (group.rank() != 0) return group.send(own(group.rank()), 0, 1);
    std::vector<int> sources;
    for (int i = 0; i < 2; ++i) {
      at::Tensor tensor = at::empty({7});
      const int source = group.recv_any(tensor, 1);
      expect_equal(tensor, own(source));
      sources.push_back(source);
    }
    EXPECT_THAT(sources, ::testing::UnorderedElementsAre(1, 2));
  });
}

TEST(PointToPoint, ReceivesNothingFromAny) {
  run_group(2, [](ProcessGroup group) {
    at::Tensor tensor = at::empty({0});
    if (group.rank() != 0) return group.send(tensor, 0, 1);
    EXPECT_EQ(group.recv_any(tensor, 1), 1);
  });
}

TEST(PointToPoint, BatchInAnyOrder) {
  run_group(2, [](ProcessGroup group) {
    const int other = 1 - group.rank();
    at::Tensor a = at::empty({7}), b = at::empty({3});
    std::vector<P2POp> ops{{P2POp::Kind::recv, a, other, 1},
                           {P2POp::Kind::recv, b, other, 2},
                           {P2POp::Kind::send, own(group.rank(), 3), other, 2},
                           {P2POp::Kind::send, own(group.rank(), 7), other, 1}};
    if (group.rank() == 1) std::reverse(ops.begin(), ops.end());
    for (auto& work : group.batch_isend_irecv(ops)) work.wait();
    expect_equal(a, own(other, 7));
    expect_equal(b, own(other, 3));
  });
}

TEST(MismatchErrors, TellARankOfEachCall) {
  for (const char* backend : {"gloo", "shm", "hierarchical"}) {
    SCOPED_TRACE(backend);
    RankOptions options{.backend = backend};
    if (options.backend == "hierarchical") options.hosts = "aab";
    run_group(
        3,
        [](const ProcessGroup& group) {
          at::Tensor tensor = at::ones({group.rank() == 1 ? 5 : 4});
          EXPECT_EQ(test::ranks_of<MismatchError>([&] { group.all_reduce(tensor); }),
                    (std::vector<int>{0, 1}));
        },
        options);
  }
}

// More rounds than are compared.
void sends_to_all_and_itself(const ProcessGroup& group) {
  const int next = (group.rank() + 1) % group.size();
  const int last = (group.rank() + group.size() - 1) % group.size();
  at::Tensor passed_on = own(group.rank(), 3001);  // What is sent lies where another's comes.
  for (const Work& work : group.batch_isend_irecv(
           {{P2POp::Kind::recv, passed_on, last}, {P2POp::Kind::send, passed_on, next}}))
    work.wait();
  expect_equal(passed_on, own(last, 3001));
  for (int round = 0; round < 12; ++round) {
    std::vector<P2POp> ops;
    Tensors received;
    for (int peer = 0; peer < group.size(); ++peer) {
      ops.push_back({P2POp::Kind::send, own(group.rank()) * 10 + peer, peer, 3});
      received.push_back(at::zeros_like(own(0)));
      ops.push_back({P2POp::Kind::recv, received.back(), peer, 3});
    }
    for (const Work& work : group.batch_isend_irecv(ops)) work.wait();
    for (int peer = 0; peer < group.size(); ++peer)
      expect_equal(received[static_cast<size_t>(peer)], own(peer) * 10 + group.rank());
  }
  const Work sent = group.isend(own(7), group.rank(), 5);
  at::Tensor any = at::zeros_like(own(0));
  EXPECT_EQ(group.recv_any(any, 5), group.rank());
  sent.wait();
  expect_equal(any, own(7));
  group.barrier();
}

void meets_itself_with_another_size(const ProcessGroup& group) {
  const Work sent = group.isend(at::ones({4}), group.rank());  // Over gloo it has ended by now.
  at::Tensor less = at::zeros({3});
  EXPECT_THROW(group.irecv(less, group.rank()).wait(), MismatchError);
  group.barrier();
}

void waits_for_itself_in_vain(ProcessGroup group) {
  group.barrier();
  group.set_timeout(milliseconds(100));
  at::Tensor tensor = at::ones({4});
  EXPECT_THROW(group.recv(tensor, group.rank()), TimeoutError);
  group.set_timeout(milliseconds(20'000));
  group.barrier();
}

TEST(PointToPoint, ReachesItself) {
  for (const DebugLevel debug : {DebugLevel::info, DebugLevel::off}) {
    const RankOptions options{.debug = debug, .backend = "shm"};
    run_group(3, sends_to_all_and_itself, options);
    run_group(3, meets_itself_with_another_size, options);
    run_group(3, waits_for_itself_in_vain, options);
  }
}

TEST(PointToPoint, OverGlooDoesNotReachItself) {
  for (const char* backend : {"gloo", "hierarchical"}) {
    RankOptions options{.backend = backend};
    if (options.backend == "hierarchical") options.hosts = "aab";
    run_group(
        3,
        [](const ProcessGroup& group) {
          at::Tensor tensor = at::ones({4});
          EXPECT_THROW(group.send(tensor, group.rank()), UsageError);
          EXPECT_THROW(group.recv(tensor, group.rank(), /*tag=*/1), UsageError);
          group.barrier();
        },
        options);
  }
}

TEST(PointToPoint, TellsOfItsEnd) {
  run_group(2, [](ProcessGroup group) {
    const int other = 1 - group.rank();
    at::Tensor tensor = at::empty({7});
    const Work receiving = group.irecv(tensor, other);
    std::promise<std::exception_ptr> called;
    receiving.then([&](std::exception_ptr error) { called.set_value(error); });
    EXPECT_FALSE(group.rank() == 0 && receiving.is_completed());
    group.barrier();
    group.send(own(group.rank()), other);
    EXPECT_EQ(called.get_future().get(), nullptr);
    receiving.wait();
    EXPECT_TRUE(receiving.is_completed());
    expect_equal(tensor, own(other));
  });
}

TEST(PointToPoint, ClosingEndsWhatIsPending) {
  std::atomic<int> told{0};
  run_group(2, [&](ProcessGroup group) {
    at::Tensor tensor = at::empty({7});
    const Work receiving = group.irecv(tensor, 1 - group.rank());
    receiving.then([&](std::exception_ptr error) { told += error != nullptr; });
    group.barrier();
  });
  EXPECT_EQ(told, 2);
}

TEST_P(OfSize, Objects) {
  run_group(GetParam(), [](ProcessGroup group) {
    const auto make = [](int rank) {
      return nlohmann::json{{"rank", rank},
                            {"text", std::string(static_cast<size_t>(rank) * 50, 'x')},
                            {"list", {1, 2.5, nullptr, true}}};
    };
    const int last = group.size() - 1;
    const auto all = group.all_gather_object(make(group.rank()));
    ASSERT_EQ(all.size(), static_cast<size_t>(group.size()));
    for (int i = 0; i < group.size(); ++i) EXPECT_EQ(all[static_cast<size_t>(i)], make(i));
    const auto gathered = group.gather_object(make(group.rank()), last);
    EXPECT_EQ(gathered, group.rank() == last ? all : std::vector<nlohmann::json>{});
    EXPECT_EQ(group.broadcast_object(group.rank() == last ? make(7) : nullptr, last), make(7));
    std::vector<nlohmann::json> parts;
    if (group.rank() == last) {
      for (int i = 0; i < group.size(); ++i) parts.push_back(make(i + 1));
    }
    EXPECT_EQ(group.scatter_object(parts, last), make(group.rank() + 1));
  });
}

TEST(Groups, SplitByColorAndKey) {
  run_group(4, [](ProcessGroup group) {
    // Even and odd ranks, each in reverse order.
    const ProcessGroup half = group.split(group.rank() % 2, -group.rank());
    EXPECT_EQ(half.size(), 2);
    EXPECT_EQ(half.rank(), group.rank() < 2 ? 1 : 0);
    EXPECT_EQ(half.global_ranks(),
              group.rank() % 2 == 0 ? (std::vector<int>{2, 0}) : (std::vector<int>{3, 1}));
    at::Tensor tensor = own(group.rank());
    half.all_reduce(tensor);
    expect_equal(tensor, own(group.rank() % 2) + own(group.rank() % 2 + 2));
    // Again, of the group and of a part of it: names must not collide.
    const ProcessGroup again = group.split(0);
    const ProcessGroup deep = half.split(half.rank());
    at::Tensor one = at::ones({1}), alone = at::ones({1});
    again.all_reduce(one);
    deep.all_reduce(alone);
    EXPECT_EQ(one.item<float>(), 4);
    EXPECT_EQ(alone.item<float>(), 1);
  });
}

TEST(Groups, ANegativeColorJoinsNone) {
  run_group(3, [](ProcessGroup group) {
    const ProcessGroup part = group.split(group.rank() == 1 ? -1 : 0);
    EXPECT_EQ(static_cast<bool>(part), group.rank() != 1);
    if (!part) {
      at::Tensor tensor = at::ones({1});
      EXPECT_THROW(part.all_reduce(tensor), UsageError);
    }
  });
}

TEST(Errors, ArgumentsAreCheckedBeforeAnythingIsSent) {
  run_group(2, [](ProcessGroup group) {
    at::Tensor tensor = at::ones({4, 4}), crooked = tensor.t(), undefined;
    Tensors one{at::ones({1})};
    EXPECT_THROW(group.broadcast(tensor, 2), UsageError);
    EXPECT_THROW(group.send(tensor, -1), UsageError);
    EXPECT_THROW(group.all_reduce(crooked), UsageError);
    EXPECT_THROW(group.all_reduce(undefined), UsageError);
    EXPECT_THROW(group.all_gather(one, at::ones({1})), UsageError);
    EXPECT_THROW(group.all_gather_into_tensor(tensor, at::ones({3})), UsageError);
    EXPECT_THROW(group.reduce_scatter_tensor(tensor, at::ones({3})), UsageError);
    EXPECT_THROW(group.all_to_all_single(tensor, tensor, {4, 1}, {}), UsageError);
    EXPECT_THROW(group.all_to_all_single(tensor, tensor, {4, 1}, {1, 4}), UsageError);
    EXPECT_THROW(group.broadcast_object({}, 9), UsageError);
    Tensors not_root{at::ones({1}), at::ones({1})};
    if (group.rank() == 1) {
      EXPECT_THROW(group.gather(not_root, at::ones({1}), 0), UsageError);
    }
    group.all_reduce(tensor);  // The group is none the worse.
    expect_equal(tensor, at::full({4, 4}, 2.0));
  });
}

TEST(Errors, ACollectiveGivesUpAfterItsTimeout) {
  RankOptions options;
  options.debug = DebugLevel::off;
  std::promise<void> over;
  auto wait_over = over.get_future().share();
  run_group(
      2,
      [&](ProcessGroup group) {
        group.barrier();
        if (group.rank() == 1) return wait_over.wait();
        group.set_timeout(milliseconds(300));
        EXPECT_EQ(group.timeout(), milliseconds(300));
        at::Tensor tensor = at::ones({4});
        const auto start = std::chrono::steady_clock::now();
        EXPECT_THROW(group.all_reduce(tensor), TimeoutError);
        EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(10'000));
        over.set_value();
      },
      options);
}

TEST(Errors, FormingNamesTheMissingRanks) {
  RankOptions options;
  options.timeout = milliseconds(300);
  options.store = hash_store();
  options.store.set_timeout(options.timeout);
  try {
    form_group(test::test_context(0, 3, options), "0", {0, 1, 2}, "gloo");
    ADD_FAILURE() << "a group of one rank formed";
  } catch (const TimeoutError& error) {
    EXPECT_EQ(error.ranks(), (std::vector<int>{1, 2}));
    EXPECT_EQ(error.failure().waited_ms, 300);
  }
}

// Gloo's own is that with which the group was formed.
TEST(Errors, AMessageGivesUpAfterTheTimeoutOfNow) {
  std::promise<void> over;
  auto wait_over = over.get_future().share();
  run_group(2,
            [&](ProcessGroup group) {
              group.barrier();
              if (group.rank() == 1) return wait_over.wait();
              group.set_timeout(milliseconds(300));
              at::Tensor tensor = at::ones({4});
              const auto start = std::chrono::steady_clock::now();
              EXPECT_THROW(group.recv(tensor, 1), TimeoutError);
              EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(15'000));
              over.set_value();
            },
            {.debug = DebugLevel::off});
}

TEST(Errors, ARankGivenTwiceIsNamed) {
  RankOptions options;
  options.store = hash_store();
  const auto context = test::test_context(0, 1, options);
  const auto first = form_group(context, "0", {0}, "gloo");
  EXPECT_THROW(form_group(test::test_context(0, 1, options), "0", {0}, "gloo"), UsageError);
}

TEST(Errors, AClosedGroupSaysSo) {
  RankOptions options;
  options.store = hash_store();
  const auto impl = form_group(test::test_context(0, 1, options), "0", {0}, "gloo");
  const ProcessGroup group(impl);
  impl->close(false);
  impl->close(false);
  at::Tensor tensor = at::ones({1});
  EXPECT_THROW(group.all_reduce(tensor), CommError);
  EXPECT_THROW(group.native(), CommError);
}

TEST(Native, IsAC10dGroupWhoseCallsReachTheBackend) {
  run_group(2, [](ProcessGroup group) {
    auto& native = group.native();
    EXPECT_EQ(native.getRank(), group.rank());
    EXPECT_EQ(native.getBackendName(), "gloo");
    std::vector<at::Tensor> tensors{own(group.rank())};
    native.allreduce(tensors)->wait();
    expect_equal(tensors[0], sum_of_all(2));
  });
}

TEST(Threads, OverATcpStore) {
  RankOptions options;
  TcpStoreOptions listen;
  listen.is_listener = true;
  options.store = tcp_store(listen);
  run_group(
      2,
      [](ProcessGroup group) {
        at::Tensor tensor = own(group.rank());
        group.all_reduce(tensor);
        expect_equal(tensor, sum_of_all(2));
      },
      options);
}

}  // namespace process_group_test
}  // namespace lockstep
