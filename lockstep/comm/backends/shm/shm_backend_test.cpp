// The shared-memory backend against ATen's and Gloo's results; ranks are threads.
#include "lockstep/comm/backends/shm/shm_backend.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "tests/support/run_shm.h"
#include "tests/support/test_wait.h"
#include "tests/support/whole_numbers.h"

namespace lockstep::shm {
namespace shm_backend_test {

using test::expect_ok;
using test::expect_same;
using test::Outcome;
using test::run_shm;
using test::shm_options;
using test::tells;
using test::whole_numbers;
using test_wait::wait_until;
using ::testing::HasSubstr;
using Op = c10d::ReduceOp::RedOpType;
using Tensors = std::vector<at::Tensor>;

constexpr int64_t kSlotFloats = (256 << 10) / 4;

uint64_t seed_of_run() {
  if (const auto given = env_string("LOCKSTEP_TEST_SEED")) return std::stoull(*given);
  return std::random_device()();
}

struct Case {
  Op op;
  at::ScalarType type;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto type :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar, at::kByte, at::kShort,
        at::kInt, at::kLong, at::kBool, at::kComplexFloat, at::kComplexDouble}) {
    const bool integral = at::isIntegralType(type, /*includeBool=*/true);
    for (const auto op :
         {Op::SUM, Op::AVG, Op::PRODUCT, Op::MIN, Op::MAX, Op::BAND, Op::BOR, Op::BXOR}) {
      if (op >= Op::BAND && !integral) continue;
      if (op == Op::AVG && type == at::kBool) continue;
      if ((op == Op::MIN || op == Op::MAX) && at::isComplexType(type)) continue;
      all.push_back({op, type});
    }
  }
  return all;
}

at::Tensor combine(Op op, const at::Tensor& a, const at::Tensor& b) {
  const bool logical = a.scalar_type() == at::kBool;
  switch (op) {
    case Op::SUM:
    case Op::AVG:
      return logical ? a.logical_or(b) : a + b;
    case Op::PRODUCT:
      return logical ? a.logical_and(b) : a * b;
    case Op::MIN:
      return at::minimum(a, b);
    case Op::MAX:
      return at::maximum(a, b);
    case Op::BAND:
      return a.bitwise_and(b);
    case Op::BOR:
      return a.bitwise_or(b);
    default:
      return a.bitwise_xor(b);
  }
}

// The tree that reduction_kernels.h promises, by ATen.
at::Tensor tree(Op op, const Tensors& inputs, size_t first, size_t count) {
  if (count == 1) return inputs[first];
  size_t half = 1;
  while (half * 2 < count) half *= 2;
  return combine(op, tree(op, inputs, first, half), tree(op, inputs, first + half, count - half));
}

at::Tensor expected(Op op, Tensors inputs) {
  const auto type = inputs[0].scalar_type();
  const bool rounded = type == at::kHalf || type == at::kBFloat16;
  if (rounded)
    for (auto& input : inputs) input = input.to(at::kFloat);
  at::Tensor result = tree(op, inputs, 0, inputs.size());
  if (op == Op::AVG) {
    const auto n = static_cast<int64_t>(inputs.size());
    if (at::isComplexType(type)) {  // Each part by itself; ATen divides by n + 0i.
      result = at::view_as_complex(at::view_as_real(result) / n);
    } else {
      result = at::isIntegralType(type, false) ? at::div(result, n, "trunc").to(type) : result / n;
    }
  }
  return result.to(type);
}

class Sizes : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Sizes, ::testing::Values(1, 2, 3, 4, 7));

const std::vector<int64_t> kCounts = {
    0, 1, 13, 14, 15, 1000, kSlotFloats - 1, kSlotFloats, kSlotFloats + 1, 5 * kSlotFloats + 3};

TEST_P(Sizes, AllReduceOfEveryDtypeAndReductionIsAtens) {
  const int size = GetParam();
  const uint64_t seed = seed_of_run();
  SCOPED_TRACE("LOCKSTEP_TEST_SEED=" + std::to_string(seed));
  expect_ok(run_shm(size, [&](int rank, c10d::Backend& shm, const auto&) {
    std::mt19937_64 random(seed);
    uint64_t call = seed;
    for (const auto& [op, type] : cases()) {
      const int64_t count = kCounts[random() % kCounts.size()];
      ++call;
      Tensors inputs;
      for (int r = 0; r < size; ++r) inputs.push_back(whole_numbers(call, r, {count}, type));
      Tensors mine{inputs[static_cast<size_t>(rank)].clone()};
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      options.asyncOp = random() % 2 == 0;
      shm.allreduce(mine, options)->wait();
      expect_same(mine[0], expected(op, inputs),
                  std::string(c10::toString(type)) + " " + std::to_string(op) + " " +
                      std::to_string(count));
    }
  }));
}

TEST_P(Sizes, SumsOfFractionsHaveTheBitsOfTheTree) {
  const int size = GetParam();
  const uint64_t seed = seed_of_run();
  SCOPED_TRACE("LOCKSTEP_TEST_SEED=" + std::to_string(seed));
  expect_ok(run_shm(size, [&](int rank, c10d::Backend& shm, const auto&) {
    uint64_t call = seed;
    for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      for (const auto op : {Op::SUM, Op::AVG, Op::PRODUCT}) {
        for (const int64_t count : kCounts) {
          ++call;
          Tensors inputs;
          for (int r = 0; r < size; ++r) {
            auto generator =
                at::make_generator<at::CPUGeneratorImpl>(call * 64 + static_cast<uint64_t>(r));
            inputs.push_back(at::randn({count}, generator, at::kDouble).to(type));
          }
          Tensors mine{inputs[static_cast<size_t>(rank)].clone()};
          c10d::AllreduceOptions options;
          options.reduceOp = op;
          shm.allreduce(mine, options)->wait();
          expect_same(mine[0], expected(op, inputs),
                      std::string(c10::toString(type)) + " " + std::to_string(op) + " " +
                          std::to_string(count));
        }
      }
    }
  }));
}

// Gloo as the judge, for what it has.
TEST_P(Sizes, EveryCollectiveGivesGloosResult) {
  const int size = GetParam();
  const uint64_t seed = seed_of_run();
  SCOPED_TRACE("LOCKSTEP_TEST_SEED=" + std::to_string(seed));
  const auto types = {at::kFloat, at::kDouble, at::kHalf, at::kChar,
                      at::kByte,  at::kInt,    at::kLong};
  expect_ok(run_shm(size, [&](int rank, c10d::Backend& shm, const test::StorePtr& store) {
    auto gloo = test::make_gloo(store->clone(), rank, size, std::chrono::seconds(20));
    std::mt19937_64 random(seed);
    uint64_t call = seed;
    for (const auto type : types) {
      for (const auto op : {Op::SUM, Op::PRODUCT, Op::MIN, Op::MAX}) {
        const int64_t count = kCounts[random() % kCounts.size()];
        const int root = static_cast<int>(random() % static_cast<uint64_t>(size));
        const std::string what = std::string(c10::toString(type)) + " " + std::to_string(op) + " " +
                                 std::to_string(count) + " root " + std::to_string(root);
        const auto mine = [&](at::IntArrayRef shape) {
          return whole_numbers(++call, rank, shape, type);
        };
        // `collective` fills the tensors that it is given; both backends start from the same.
        const auto compare = [&](const char* name, const Tensors& start, auto collective,
                                 bool compared = true) {
          Tensors ours, theirs;
          for (const auto& tensor : start) {
            ours.push_back(tensor.clone());
            theirs.push_back(tensor.clone());
          }
          collective(shm, ours);
          collective(*gloo, theirs);
          for (size_t i = 0; compared && i < start.size(); ++i)
            expect_same(ours[i], theirs[i], std::string(name) + " " + what);
        };
        const auto zeros = [&](int64_t n) {
          return Tensors(static_cast<size_t>(n), at::zeros({count}, type));
        };
        compare("all_reduce", {mine({count})}, [&](c10d::Backend& backend, Tensors& t) {
          c10d::AllreduceOptions options;
          options.reduceOp = op;
          backend.allreduce(t, options)->wait();
        });
        compare(
            "reduce", {mine({count})},
            [&](c10d::Backend& backend, Tensors& t) {
              c10d::ReduceOptions options;
              options.reduceOp = op;
              options.rootRank = root;
              backend.reduce(t, options)->wait();
            },
            rank == root);
        compare("broadcast", {mine({count})}, [&](c10d::Backend& backend, Tensors& t) {
          c10d::BroadcastOptions options;
          options.rootRank = root;
          backend.broadcast(t, options)->wait();
        });
        const at::Tensor one = mine({count});
        compare("all_gather", zeros(size), [&](c10d::Backend& backend, Tensors& t) {
          std::vector<Tensors> lists{t};
          Tensors inputs{one};
          backend.allgather(lists, inputs, {})->wait();
        });
        compare("all_gather_into_tensor", {at::zeros({size * count}, type)},
                [&](c10d::Backend& backend, Tensors& t) {
                  at::Tensor input = one;
                  backend._allgather_base(t[0], input, {})->wait();
                });
        compare("gather", zeros(size), [&](c10d::Backend& backend, Tensors& t) {
          std::vector<Tensors> lists;
          if (rank == root) lists.push_back(t);
          Tensors inputs{one};
          c10d::GatherOptions options;
          options.rootRank = root;
          backend.gather(lists, inputs, options)->wait();
        });
        const at::Tensor many = mine({size, count});
        compare("scatter", zeros(1), [&](c10d::Backend& backend, Tensors& t) {
          std::vector<Tensors> lists;
          if (rank == root) lists.push_back(many.unbind(0));
          c10d::ScatterOptions options;
          options.rootRank = root;
          backend.scatter(t, lists, options)->wait();
        });
        compare("reduce_scatter", zeros(1), [&](c10d::Backend& backend, Tensors& t) {
          std::vector<Tensors> lists{many.unbind(0)};
          c10d::ReduceScatterOptions options;
          options.reduceOp = op;
          backend.reduce_scatter(t, lists, options)->wait();
        });
        compare("reduce_scatter_tensor", zeros(1), [&](c10d::Backend& backend, Tensors& t) {
          at::Tensor input = many.flatten();
          c10d::ReduceScatterOptions options;
          options.reduceOp = op;
          backend._reduce_scatter_base(t[0], input, options)->wait();
        });
        compare("all_to_all_single", {at::zeros({size, count}, type)},
                [&](c10d::Backend& backend, Tensors& t) {
                  at::Tensor input = many;
                  std::vector<int64_t> none, none_either;
                  backend.alltoall_base(t[0], input, none, none_either, {})->wait();
                });
        // Rank i gives rank j (i + 2 j) mod 4 rows.
        std::vector<int64_t> give, take;
        for (int other = 0; other < size; ++other) {
          give.push_back((rank + 2 * other) % 4);
          take.push_back((other + 2 * rank) % 4);
        }
        const int64_t width = std::min<int64_t>(count, 5000);
        const at::Tensor rows =
            mine({std::accumulate(give.begin(), give.end(), int64_t{0}), width});
        const int64_t taken = std::accumulate(take.begin(), take.end(), int64_t{0});
        compare("all_to_all_single with splits", {at::zeros({taken, width}, type)},
                [&](c10d::Backend& backend, Tensors& t) {
                  at::Tensor input = rows;
                  backend.alltoall_base(t[0], input, take, give, {})->wait();
                });
      }
    }
    shm.barrier({})->wait();
  }));
}

TEST_P(Sizes, ListsOfOtherSizesBetweenAnyTwoRanks) {
  const int size = GetParam();
  expect_ok(run_shm(size, [&](int rank, c10d::Backend& shm, const auto&) {
    const auto count = [](int from, int to) { return 1 + from * 20'000 + to * 7; };
    Tensors inputs, outputs;
    for (int other = 0; other < size; ++other) {
      inputs.push_back(at::full({count(rank, other)}, rank * 100 + other, at::kInt));
      outputs.push_back(at::zeros({count(other, rank)}, at::kInt));
    }
    shm.alltoall(outputs, inputs, {})->wait();
    for (int other = 0; other < size; ++other)
      expect_same(outputs[static_cast<size_t>(other)],
                  at::full({count(other, rank)}, other * 100 + rank, at::kInt), "all_to_all");
  }));
}

TEST_P(Sizes, TensorsThatAreNotContiguous) {
  const int size = GetParam();
  expect_ok(run_shm(size, [&](int rank, c10d::Backend& shm, const auto&) {
    const auto strided = [&](int r) {
      return at::arange(0, 60'000, at::kFloat).add(r).view({200, 300}).t();
    };
    Tensors sum{strided(rank)};
    shm.allreduce(sum, {})->wait();
    at::Tensor wanted = strided(0).contiguous();
    for (int r = 1; r < size; ++r) wanted = wanted + strided(r);
    expect_same(sum[0], wanted, "all_reduce");
    EXPECT_FALSE(sum[0].is_contiguous());
    Tensors every;
    for (int r = 0; r < size; ++r) every.push_back(at::zeros({200, 300}).t());
    std::vector<Tensors> lists{every};
    Tensors inputs{strided(rank)};
    shm.allgather(lists, inputs, {})->wait();
    for (int r = 0; r < size; ++r)
      expect_same(every[static_cast<size_t>(r)], strided(r), "all_gather");
    Tensors root{at::zeros({200, 300}).t()};
    if (rank == size - 1) root[0].copy_(strided(5));
    c10d::BroadcastOptions options;
    options.rootRank = size - 1;
    shm.broadcast(root, options)->wait();
    expect_same(root[0], strided(5), "broadcast");
  }));
}

TEST_P(Sizes, CoalescedCalls) {
  const int size = GetParam();
  expect_ok(run_shm(size, [&](int rank, c10d::Backend& shm, const auto&) {
    Tensors several{at::full({3}, rank + 1.0), at::full({50'000}, 2, at::kFloat),
                    at::empty({0}, at::kInt), at::full({2, 2}, rank, at::kLong)};
    shm.allreduce_coalesced(several, c10d::AllreduceCoalescedOptions())->wait();
    const int sum = size * (size - 1) / 2;
    expect_same(several[0], at::full({3}, static_cast<double>(sum + size)), "first");
    expect_same(several[1], at::full({50'000}, 2 * size, at::kFloat), "second");
    expect_same(several[3], at::full({2, 2}, sum, at::kLong), "last");
    Tensors inputs{at::full({2}, rank, at::kInt), at::full({40'000}, rank + 10, at::kInt)};
    Tensors outputs{at::zeros({2 * size}, at::kInt), at::zeros({40'000 * size}, at::kInt)};
    shm.allgather_into_tensor_coalesced(outputs, inputs, {})->wait();
    for (int r = 0; r < size; ++r) {
      EXPECT_EQ(outputs[0][2 * r].item<int>(), r);
      EXPECT_EQ(outputs[1][40'000 * (r + 1) - 1].item<int>(), r + 10);
    }
  }));
}

TEST_P(Sizes, SparseTensors) {
  const int size = GetParam();
  expect_ok(run_shm(size, [&](int rank, c10d::Backend& shm, const auto&) {
    const auto of = [](int r) {
      at::Tensor dense = at::zeros({50, 3});
      for (int i = 0; i <= r; ++i) dense[(i * 7 + r) % 50] += r + 1.0;
      return dense;
    };
    Tensors mine{of(rank).to_sparse(1)};
    shm.allreduce(mine, {})->wait();
    at::Tensor wanted = of(0);
    for (int r = 1; r < size; ++r) wanted = wanted + of(r);
    expect_same(mine[0].to_dense(), wanted, "sparse");
  }));
}

TEST_P(Sizes, AsynchronousCallsKeepTheirOrderAndResolveTheirFutures) {
  const int size = GetParam();
  expect_ok(run_shm(size, [&](int rank, c10d::Backend& shm, const auto&) {
    constexpr int kCalls = 60;
    std::vector<Tensors> data;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::atomic<int> called{0};
    for (int i = 0; i < kCalls; ++i) data.push_back({at::full({i * 1000 + 1}, rank + i)});
    for (int i = 0; i < kCalls; ++i) {
      // Another rank is late at each call.
      if (i % size == rank) std::this_thread::yield();
      works.push_back(shm.allreduce(data[static_cast<size_t>(i)], {}));
      works.back()->getFuture()->addCallback([&](c10::ivalue::Future&) { ++called; });
    }
    for (int i = 0; i < kCalls; ++i) {
      works[static_cast<size_t>(i)]->wait();
      EXPECT_TRUE(works[static_cast<size_t>(i)]->isSuccess());
      const at::Tensor result =
          works[static_cast<size_t>(i)]->getFuture()->value().toTensorVector()[0];
      EXPECT_EQ(result[i * 1000].item<int64_t>(), size * (size - 1) / 2 + i * size);
    }
    EXPECT_EQ(called, kCalls);
  }));
}

// Legal, as the calls are asynchronous: over Gloo it works, over a backend that blocks in the call
// it is a deadlock.
TEST(ShmBackend, TwoGroupsMayBeCalledInDifferentOrders) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  expect_ok(run_shm(2, [&](int rank, c10d::Backend& one, const auto&) {
    auto other_store = c10::make_intrusive<c10d::PrefixStore>("other", store);
    auto other = c10::make_intrusive<ShmBackend>(
        shm_options(other_store, rank, 2, std::chrono::seconds(20)));
    for (int round = 0; round < 20; ++round) {
      Tensors a{at::ones({50'000})}, b{at::ones({50'000})};
      auto first = rank == 0 ? one.allreduce(a, {}) : other->allreduce(b, {});
      auto second = rank == 0 ? other->allreduce(b, {}) : one.allreduce(a, {});
      first->wait();
      second->wait();
      EXPECT_EQ(a[0][49'999].item<float>(), 2);
      EXPECT_EQ(b[0][49'999].item<float>(), 2);
    }
  }));
}

struct Mistake {
  const char* name;
  std::function<void(int rank, c10d::Backend&)> call;
  std::vector<std::string> texts;
};

class Mistakes : public ::testing::TestWithParam<Mistake> {};

TEST_P(Mistakes, AreToldToAllRanksAndLeaveTheGroupUsable) {
  const auto outcomes = run_shm(3, [](int rank, c10d::Backend& shm, const auto&) {
    try {
      GetParam().call(rank, shm);
      ADD_FAILURE() << "rank " << rank << " noticed nothing";
    } catch (const MismatchError& error) {
      for (const auto& text : GetParam().texts) EXPECT_THAT(error.what(), HasSubstr(text));
    }
    Tensors after{at::ones({4})};
    shm.allreduce(after, {})->wait();
    EXPECT_EQ(after[0][3].item<float>(), 3);
  });
  expect_ok(outcomes);
}

void all_reduce(c10d::Backend& shm, at::Tensor tensor, Op op = Op::SUM) {
  Tensors tensors{std::move(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  shm.allreduce(tensors, options)->wait();
}
void broadcast(c10d::Backend& shm, at::Tensor tensor, int root) {
  Tensors tensors{std::move(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  shm.broadcast(tensors, options)->wait();
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, Mistakes,
    ::testing::Values(
        Mistake{"Shape",
                [](int rank, auto& shm) { all_reduce(shm, at::ones({rank == 1 ? 5 : 4})); },
                {"ranks 0 and 2 called all_reduce(sum) of float32 [4]",
                 "rank 1 called all_reduce(sum) of float32 [5]"}},
        Mistake{"LargeShape",
                [](int rank, auto& shm) { all_reduce(shm, at::ones({rank == 1 ? 90'000 : 4})); },
                {"float32 [4]", "rank 1 called all_reduce(sum) of float32 [90000]"}},
        Mistake{"Dtype",
                [](int rank, auto& shm) {
                  all_reduce(shm, at::ones({4}, rank == 2 ? at::kInt : at::kFloat));
                },
                {"float32 [4]", "rank 2 called all_reduce(sum) of int32 [4]"}},
        Mistake{"Reduction",
                [](int rank, auto& shm) {
                  all_reduce(shm, at::ones({4}), rank == 0 ? Op::MAX : Op::SUM);
                },
                {"rank 0 called all_reduce(max)", "all_reduce(sum)"}},
        Mistake{"Root",
                [](int rank, auto& shm) { broadcast(shm, at::ones({4}), rank == 0 ? 0 : 1); },
                {"broadcast(root 0)", "broadcast(root 1)"}},
        Mistake{"Operation",
                [](int rank, auto& shm) {
                  if (rank == 0) {
                    shm.barrier({})->wait();
                  } else {
                    all_reduce(shm, at::ones({100'000}));
                  }
                },
                {"rank 0 called barrier", "ranks 1 and 2 called all_reduce(sum)"}},
        Mistake{"Splits",
                [](int rank, auto& shm) {
                  at::Tensor input = at::ones({3}), output = at::ones({rank == 1 ? 4 : 3});
                  std::vector<int64_t> give{1, 1, 1},
                      take = rank == 1 ? std::vector<int64_t>{1, 1, 2} : give;
                  shm.alltoall_base(output, input, take, give, {})->wait();
                },
                {"all_to_all_single", "rank 1"}}),
    [](const auto& info) { return info.param.name; });

TEST(ShmBackend, ARankThatDoesNotComeIsNamed) {
  const auto outcomes = run_shm(
      3,
      [](int rank, c10d::Backend& shm, const auto&) {
        all_reduce(shm, at::ones({2}));
        if (rank == 1) return;
        all_reduce(shm, at::ones({4}));
      },
      300);
  EXPECT_TRUE(outcomes[1].ok());
  for (const int rank : {0, 2}) {
    const auto& outcome = outcomes[static_cast<size_t>(rank)];
    EXPECT_TRUE(outcome.is<TimeoutError>()) << outcome.text();
    const Failure failure = outcome.failure();
    ASSERT_EQ(failure.ranks.size(), 1U);
    EXPECT_TRUE(tells(failure, Failure::Kind::late, 1));
    EXPECT_EQ(failure.ranks[0].process, ::getpid());
    EXPECT_EQ(failure.ranks[0].calls, 1);
    EXPECT_EQ(failure.calls, 2);
    EXPECT_EQ(failure.waited_ms, 300);
  }
}

TEST(ShmBackend, ARankThatLeavesFailsTheOthersAtOnce) {
  const auto started = std::chrono::steady_clock::now();
  const auto outcomes = run_shm(3, [](int rank, c10d::Backend& shm, const auto&) {
    all_reduce(shm, at::ones({2}));
    if (rank == 2) return shm.shutdown();
    all_reduce(shm, at::ones({4}));
  });
  for (const int rank : {0, 1}) {
    const auto& outcome = outcomes[static_cast<size_t>(rank)];
    EXPECT_TRUE(outcome.is<PeerLostError>()) << outcome.text();
    EXPECT_TRUE(tells(outcome.failure(), Failure::Kind::closed, 2));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds(10));
}

TEST(ShmBackend, WhatIsSentArrivesAlsoWhenTheWorkIsDropped) {
  constexpr int64_t kLarge = 1 << 20;
  expect_ok(run_shm(2, [](int rank, c10d::Backend& shm, const test::StorePtr&) {
    for (int i = 0; i < 8; ++i) {
      Tensors sent{at::full({kLarge}, i, at::kFloat)}, received{at::zeros({kLarge})};
      if (rank == 0) {
        shm.send(sent, 1, i);
      } else {
        shm.recv(received, 0, 7 - i)->wait();
        EXPECT_TRUE(received[0].eq(7 - i).all().item<bool>());
      }
    }
    shm.barrier()->wait();
  }));
}

TEST(ShmBackend, AnAbortFailsTheOthersAndWhatIsUnderWay) {
  const auto outcomes = run_shm(2, [](int rank, c10d::Backend& shm, const auto&) {
    if (rank == 1) return shm.abort();
    all_reduce(shm, at::ones({4}));
  });
  EXPECT_TRUE(outcomes[0].is<PeerLostError>()) << outcomes[0].text();
  EXPECT_TRUE(tells(outcomes[0].failure(), Failure::Kind::gave_up, 1));
}

TEST(ShmBackend, AnAbortOverTheLossOfAnotherNamesThatOne) {
  const auto outcomes = run_shm(3, [](int rank, c10d::Backend& shm, const auto&) {
    if (rank == 2) return shm.shutdown();
    if (rank == 1) return all_reduce(shm, at::ones({4}));
    Tensors received{at::ones({4})};
    EXPECT_THROW(shm.recv(received, 2, 0)->wait(), PeerLostError);
    shm.abort();
  });
  EXPECT_TRUE(outcomes[1].is<PeerLostError>()) << outcomes[1].text();
  EXPECT_TRUE(tells(outcomes[1].failure(), Failure::Kind::closed, 2));
}

TEST(ShmBackend, AnAbortAfterALateMessageTellsWhomItWaitedFor) {
  std::atomic<bool> is_over{false};
  const auto outcomes = run_shm(3, [&](int rank, c10d::Backend& shm, const auto&) {
    if (rank == 1) return all_reduce(shm, at::ones({4}));
    if (rank == 2) return wait_until([&] { return is_over.load(); }, "the abort");
    Tensors received{at::ones({4})};
    EXPECT_THROW(shm.recv(received, 2, 0)->wait(std::chrono::milliseconds(100)), TimeoutError);
    shm.abort();
    is_over = true;
  });
  EXPECT_TRUE(outcomes[1].is<PeerLostError>()) << outcomes[1].text();
  EXPECT_TRUE(tells(outcomes[1].failure(), Failure::Kind::gave_up, 0));
  EXPECT_THAT(
      outcomes[1].failure().detail,
      ::testing::MatchesRegex("; it failed in recv\\(from rank 2\\).* did not finish within "
                              "0.1 s: rank 2 \\(process .* did not call the send"));
}

TEST(ShmBackend, AnAbortDoesNotBlameALateMessageThatWasGotOver) {
  std::atomic<bool> waited{false};
  const auto outcomes = run_shm(2, [&](int rank, c10d::Backend& shm, const auto&) {
    Tensors message{at::ones({4})};
    if (rank == 1) {
      wait_until([&] { return waited.load(); }, "rank 0 to have waited");
      shm.send(message, 0, 0)->wait();
      return all_reduce(shm, at::ones({4}));
    }
    EXPECT_THROW(shm.recv(message, 1, 0)->wait(std::chrono::milliseconds(50)), TimeoutError);
    waited = true;
    shm.recv(message, 1, 0)->wait();
    shm.abort();
  });
  EXPECT_TRUE(tells(outcomes[1].failure(), Failure::Kind::gave_up, 0));
  EXPECT_EQ(outcomes[1].failure().detail, "");
}

TEST(ShmBackend, MisuseIsAnErrorOfThisRankAlone) {
  expect_ok(run_shm(1, [](int, c10d::Backend& shm, const auto&) {
    EXPECT_THROW(all_reduce(shm, at::ones({2}), Op::BAND), UsageError);
    EXPECT_THROW(broadcast(shm, at::ones({2}), 1), UsageError);
    EXPECT_THROW(broadcast(shm, at::ones({2}).to_sparse(), 0), UsageError);
    Tensors two{at::ones({1}), at::ones({1})};
    EXPECT_THROW(shm.allreduce(two, {}), UsageError);
    Tensors few{at::ones({1})};
    std::vector<Tensors> lists{{at::ones({2})}};
    EXPECT_THROW(shm.allgather(lists, few, {}), UsageError);
  }));
}

size_t open_descriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++count;
  return count;
}
size_t mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);)
    count += line.find("memfd:lockstep") != line.npos;
  return count;
}

TEST(ShmBackend, ThousandsOfGroupsLeaveNothingBehind) {
  const size_t descriptors = open_descriptors();
  expect_ok(run_shm(2, [](int rank, c10d::Backend& all, const test::StorePtr& store) {
    for (int round = 0; round < 1500; ++round) {
      auto own = c10::make_intrusive<c10d::PrefixStore>(std::to_string(round), store);
      auto group =
          c10::make_intrusive<ShmBackend>(shm_options(own, rank, 2, std::chrono::seconds(20)));
      all_reduce(*group, at::ones({3}));
    }
  }));
  EXPECT_LE(open_descriptors(), descriptors + 2);
  EXPECT_EQ(mappings(), 0U);
}

}  // namespace shm_backend_test
}  // namespace lockstep::shm
