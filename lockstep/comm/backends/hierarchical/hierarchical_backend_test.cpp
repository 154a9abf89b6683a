// The hierarchical backend against ATen's and Gloo's results. Ranks are threads, and hosts are
// declared by hand.
#include "lockstep/comm/backends/hierarchical/hierarchical_backend.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <random>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/process_identity.h"
#include "lockstep/comm/backends/hierarchical/hierarchical.h"
#include "lockstep/comm/backends/hierarchical/host_collectives.h"
#include "tests/support/run_backends.h"
#include "tests/support/whole_numbers.h"

namespace lockstep::hierarchical {
namespace {

using ::testing::AllOf;
using testing::expect_ok;
using testing::expect_same;
using ::testing::HasSubstr;
using testing::Outcome;
using testing::whole_numbers;
using Op = c10d::ReduceOp::RedOpType;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

uint64_t seed_of_run() {
  if (const auto given = env_string("LOCKSTEP_TEST_SEED")) return std::stoull(*given);
  return std::random_device()();
}

/// The host of each rank: "aabb" are four ranks on two hosts.
BackendOptions options_of(const testing::StorePtr& store, const std::string& hosts, int rank,
                          std::chrono::milliseconds timeout) {
  BackendOptions options;
  options.store = c10::make_intrusive<c10d::PrefixStore>("hierarchical", store);
  options.rank = rank;
  options.size = static_cast<int>(hosts.size());
  options.timeout = timeout;
  options.host = hosts.substr(static_cast<size_t>(rank), 1);
  for (int i = 0; i < options.size; ++i) options.global_ranks.push_back(i);
  return options;
}

using Part = std::function<void(int rank, c10d::Backend& backend, const testing::StorePtr& store)>;

std::vector<Outcome> run(const std::string& hosts, const Part& part, int milliseconds = 20'000) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<testing::BackendPtr> backends(hosts.size());
  const auto outcomes = testing::run_ranks(static_cast<int>(hosts.size()), [&](int rank) {
    auto& backend = backends[static_cast<size_t>(rank)];
    backend = make(options_of(store, hosts, rank, std::chrono::milliseconds(milliseconds))).backend;
    part(rank, *backend, store);
  });
  // In any order, as processes end.
  for (auto& backend : backends)
    if (backend) backend->shutdown();
  return outcomes;
}

class Placements : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Hosts, Placements, ::testing::Values("aabb", "aaab", "aabbc", "abcab"),
                         [](const auto& info) { return info.param; });

// What travels with the comparison of calls, a chunk of the least size, many of the largest; for
// elements of four bytes.
constexpr int64_t kSmall = SmallData::kMost / 4, kLeast = kLeastChunkBytes / 4,
                  kPiece = kChunkBytes / 4;
const std::vector<int64_t> kSizes = {
    0,          1,      13,         kSmall - 1, kSmall,         kSmall + 1,
    kLeast - 1, kLeast, kLeast + 1, kPiece + 1, 9 * kPiece + 3, 1000};

TEST_P(Placements, EveryCollectiveGivesGloosResult) {
  const std::string& hosts = GetParam();
  const int size = static_cast<int>(hosts.size());
  const uint64_t seed = seed_of_run();
  SCOPED_TRACE("LOCKSTEP_TEST_SEED=" + std::to_string(seed));
  const auto types = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                      at::kChar,  at::kByte,   at::kInt,  at::kLong};
  expect_ok(run(hosts, [&](int rank, c10d::Backend& ours, const testing::StorePtr& store) {
    EXPECT_EQ(ours.getBackendName(), "hierarchical");
    auto gloo = testing::make_gloo(store->clone(), rank, size, std::chrono::seconds(20));
    std::mt19937_64 random(seed);
    uint64_t call = seed;
    size_t next = random() % kSizes.size();
    for (const auto type : types) {
      for (const auto op : {Op::SUM, Op::AVG, Op::PRODUCT, Op::MIN, Op::MAX}) {
        const int64_t count = kSizes[next++ % kSizes.size()];
        const int root = static_cast<int>(random() % static_cast<uint64_t>(size));
        const bool async = random() % 2 == 0;
        const std::string what = std::string(c10::toString(type)) + " " + std::to_string(op) + " " +
                                 std::to_string(count) + " root " + std::to_string(root);
        // An average of integers is rounded in other ways by Gloo.
        const bool reduces = op != Op::AVG || at::isFloatingType(type);
        const auto mine = [&](at::IntArrayRef shape) {
          return whole_numbers(++call, rank, shape, type);
        };
        const auto compare = [&](const char* name, const Tensors& start, auto collective) {
          Tensors one, other;
          for (const auto& tensor : start) {
            one.push_back(tensor.clone());
            other.push_back(tensor.clone());
          }
          collective(ours, one);
          collective(*gloo, other);
          for (size_t i = 0; i < start.size(); ++i)
            expect_same(one[i], other[i], std::string(name) + " " + what);
        };
        const auto zeros = [&](int64_t n) {
          return Tensors(static_cast<size_t>(n), at::zeros({count}, type));
        };
        const at::Tensor one = mine({count}), many = mine({size, count});
        if (reduces)
          compare("all_reduce", {one}, [&](c10d::Backend& backend, Tensors& t) {
            c10d::AllreduceOptions options;
            options.reduceOp = op;
            options.asyncOp = async;
            backend.allreduce(t, options)->wait();
          });
        compare("broadcast", {one}, [&](c10d::Backend& backend, Tensors& t) {
          c10d::BroadcastOptions options;
          options.rootRank = root;
          options.asyncOp = async;
          backend.broadcast(t, options)->wait();
        });
        compare("all_gather", zeros(size), [&](c10d::Backend& backend, Tensors& t) {
          TensorLists lists{t};
          Tensors inputs{one};
          backend.allgather(lists, inputs, {})->wait();
        });
        compare("all_gather_into_tensor", {at::zeros({size * count}, type)},
                [&](c10d::Backend& backend, Tensors& t) {
                  at::Tensor input = one;
                  backend._allgather_base(t[0], input, {})->wait();
                });
        if (!reduces || op == Op::AVG) continue;  // Gloo's reduce_scatter has no average.
        compare("reduce_scatter", zeros(1), [&](c10d::Backend& backend, Tensors& t) {
          TensorLists lists{many.unbind(0)};
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
      }
    }
    ours.barrier({})->wait();
  }));
}

// Hosts differ in nothing but who computes, so all ranks must hold the same bits, in every run.
TEST_P(Placements, SumsOfFractionsHaveTheSameBitsOnEveryRankAndInEveryRun) {
  const std::string& hosts = GetParam();
  const uint64_t seed = seed_of_run();
  SCOPED_TRACE("LOCKSTEP_TEST_SEED=" + std::to_string(seed));
  std::vector<Tensors> results(hosts.size());
  for (int repeat = 0; repeat < 2; ++repeat) {
    expect_ok(run(hosts, [&](int rank, c10d::Backend& backend, const auto&) {
      uint64_t call = seed;
      for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
        for (const auto op : {Op::SUM, Op::AVG}) {
          for (const int64_t count : {7L, 1000L, 300'001L}) {
            auto generator =
                at::make_generator<at::CPUGeneratorImpl>(++call * 64 + static_cast<uint64_t>(rank));
            Tensors mine{at::randn({count}, generator, at::kDouble).to(type)};
            c10d::AllreduceOptions options;
            options.reduceOp = op;
            backend.allreduce(mine, options)->wait();
            results[static_cast<size_t>(rank)].push_back(mine[0]);
          }
        }
      }
    }));
  }
  const size_t each = results[0].size() / 2;
  for (size_t i = 0; i < each; ++i) {
    for (const auto& mine : results) {
      expect_same(mine[i], results[0][i], "rank against rank, " + std::to_string(i));
      expect_same(mine[i + each], mine[i], "run against run, " + std::to_string(i));
    }
  }
}

// What Gloo has no reduction of, and what its own rounding makes differ, against ATen.
TEST_P(Placements, DtypesThatGlooHasNotAndAveragesOfIntegers) {
  const std::string& hosts = GetParam();
  const int size = static_cast<int>(hosts.size());
  expect_ok(run(hosts, [&](int rank, c10d::Backend& backend, const auto&) {
    for (const int64_t count : {3L, 5000L, 100'000L}) {
      for (const auto type : {at::kShort, at::kComplexDouble, at::kComplexFloat, at::kBool}) {
        at::Tensor wanted;
        for (int r = 0; r < size; ++r) {
          const at::Tensor one = whole_numbers(5, r, {count}, type);
          if (type == at::kBool) {
            wanted = r == 0 ? one : wanted.logical_or(one);
          } else {
            wanted = r == 0 ? one : wanted + one;
          }
        }
        Tensors mine{whole_numbers(5, rank, {count}, type)};
        backend.allreduce(mine, {})->wait();
        expect_same(mine[0], wanted, c10::toString(type));
      }
      Tensors numbers{at::full({count}, rank == 0 ? -7 : -1, at::kInt)};
      c10d::AllreduceOptions options;
      options.reduceOp = Op::AVG;
      backend.allreduce(numbers, options)->wait();
      expect_same(numbers[0], at::full({count}, -(7 + size - 1) / size, at::kInt), "average");
      Tensors bits{at::full({count}, 1 << rank, at::kInt)};
      options.reduceOp = Op::BOR;
      backend.allreduce(bits, options)->wait();
      expect_same(bits[0], at::full({count}, (1 << size) - 1, at::kInt), "bor");
    }
  }));
}

TEST_P(Placements, CoalescedCallsAndTensorsThatAreNotContiguous) {
  const std::string& hosts = GetParam();
  const int size = static_cast<int>(hosts.size());
  expect_ok(run(hosts, [&](int rank, c10d::Backend& backend, const auto&) {
    Tensors several{at::full({3}, rank + 1.0), at::full({50'000}, 2, at::kFloat),
                    at::empty({0}, at::kInt), at::full({2, 2}, rank, at::kLong)};
    backend.allreduce_coalesced(several, c10d::AllreduceCoalescedOptions())->wait();
    const int sum = size * (size - 1) / 2;
    expect_same(several[0], at::full({3}, static_cast<double>(sum + size)), "first");
    expect_same(several[1], at::full({50'000}, 2 * size, at::kFloat), "second");
    expect_same(several[3], at::full({2, 2}, sum, at::kLong), "last");
    Tensors inputs{at::full({2}, rank, at::kInt), at::full({40'000}, rank + 10, at::kInt)};
    Tensors outputs{at::zeros({2 * size}, at::kInt), at::zeros({40'000 * size}, at::kInt)};
    backend.allgather_into_tensor_coalesced(outputs, inputs, {})->wait();
    for (int r = 0; r < size; ++r) {
      EXPECT_EQ(outputs[0][2 * r].item<int>(), r);
      EXPECT_EQ(outputs[1][40'000 * (r + 1) - 1].item<int>(), r + 10);
    }
    Tensors parts{at::zeros({1}, at::kInt), at::zeros({30'000}, at::kInt)};
    Tensors wholes{at::arange(size, at::kInt), at::full({30'000 * size}, rank, at::kInt)};
    backend.reduce_scatter_tensor_coalesced(parts, wholes, {})->wait();
    EXPECT_EQ(parts[0].item<int>(), rank * size);
    expect_same(parts[1], at::full({30'000}, sum, at::kInt), "reduce_scatter_tensor_coalesced");
    const auto strided = [&](int r) {
      return at::arange(0, 60'000, at::kFloat).add(r).view({200, 300}).t();
    };
    Tensors total{strided(rank)};
    backend.allreduce(total, {})->wait();
    expect_same(total[0], strided(0) * size + sum, "all_reduce");
    EXPECT_FALSE(total[0].is_contiguous());
    Tensors root{at::zeros({200, 300}).t()};
    if (rank == size - 1) root[0].copy_(strided(5));
    c10d::BroadcastOptions options;
    options.rootRank = size - 1;
    backend.broadcast(root, options)->wait();
    expect_same(root[0], strided(5), "broadcast");
  }));
}

// What rank `from` has for rank `to`, in a call of its own `kind`; of some nothing.
at::Tensor part(int kind, int from, int to, int64_t count) {
  return at::arange(count, at::kInt) * 100 + 10 * from + to + 10'000 * kind;
}

TEST_P(Placements, WhatOneRankHasForAnotherGoesThere) {
  const std::string& hosts = GetParam();
  const int size = static_cast<int>(hosts.size());
  const uint64_t seed = seed_of_run();
  SCOPED_TRACE("LOCKSTEP_TEST_SEED=" + std::to_string(seed));
  expect_ok(run(hosts, [&](int rank, c10d::Backend& backend, const auto&) {
    std::mt19937_64 random(seed);
    const auto any = [&](auto below) {
      return static_cast<int64_t>(random() % static_cast<uint64_t>(below));
    };
    for (const int64_t count : kSizes) {
      const int root = static_cast<int>(any(size));
      SCOPED_TRACE(std::to_string(count) + " elements, root " + std::to_string(root));
      const bool is_root = rank == root;
      Tensors inputs{part(0, rank, root, count)};
      TensorLists outputs;
      if (is_root) outputs.push_back(Tensors(static_cast<size_t>(size)));
      for (auto& list : outputs)
        for (auto& output : list) output = at::zeros({count}, at::kInt);
      c10d::GatherOptions gather;
      gather.rootRank = root;
      backend.gather(outputs, inputs, gather)->wait();
      for (int r = 0; r < size && is_root; ++r)
        expect_same(outputs[0][static_cast<size_t>(r)], part(0, r, root, count), "gather");

      TensorLists lists;
      if (is_root) lists.emplace_back();
      for (int r = 0; r < size && is_root; ++r) lists[0].push_back(part(1, root, r, count));
      Tensors scattered{at::zeros({count}, at::kInt)};
      c10d::ScatterOptions scatter;
      scatter.rootRank = root;
      backend.scatter(scattered, lists, scatter)->wait();
      expect_same(scattered[0], part(1, root, rank, count), "scatter");

      Tensors sum{at::full({count}, rank + 1, at::kFloat)};
      c10d::ReduceOptions reduce;
      reduce.rootRank = root;
      backend.reduce(sum, reduce)->wait();
      const int all = size * (size + 1) / 2;
      expect_same(sum[0], at::full({count}, is_root ? all : rank + 1, at::kFloat), "reduce");

      // Every pair another number of rows, some none.
      std::vector<int64_t> rows;
      for (int i = 0; i < size * size; ++i) rows.push_back(any(3) * any(count / 4 + 2));
      const auto rows_of = [&](int from, int to) {
        return rows[static_cast<size_t>(from * size + to)];
      };
      std::vector<int64_t> sent, received;
      Tensors given, wanted, taken;
      for (int r = 0; r < size; ++r) {
        sent.push_back(rows_of(rank, r));
        received.push_back(rows_of(r, rank));
        given.push_back(part(2, rank, r, sent.back()));
        wanted.push_back(part(2, r, rank, received.back()));
        taken.push_back(at::zeros_like(wanted.back()));
      }
      at::Tensor input = at::cat(given), output = at::zeros_like(at::cat(wanted));
      backend.alltoall_base(output, input, received, sent, {})->wait();
      expect_same(output, at::cat(wanted), "all_to_all_single");
      backend.alltoall(taken, given, {})->wait();
      for (size_t r = 0; r < taken.size(); ++r) expect_same(taken[r], wanted[r], "all_to_all");
    }
  }));
}

TEST_P(Placements, MessagesAndSparseTensors) {
  const std::string& hosts = GetParam();
  const int size = static_cast<int>(hosts.size());
  expect_ok(run(hosts, [&](int rank, c10d::Backend& backend, const auto&) {
    // Each rank sends to the next, with another tag each time, and receives in another order.
    Tensors one{at::full({3}, rank, at::kInt)}, two{at::full({100'000}, rank + 100, at::kInt)};
    Tensors in_one{at::zeros({3}, at::kInt)}, in_two{at::zeros({100'000}, at::kInt)};
    const int next = (rank + 1) % size, last = (rank + size - 1) % size;
    auto first = backend.send(one, next, 1), second = backend.send(two, next, 2);
    backend.recv(in_two, last, 2)->wait();
    backend.recv(in_one, last, 1)->wait();
    first->wait();
    second->wait();
    EXPECT_EQ(in_one[0][2].item<int>(), last);
    EXPECT_EQ(in_two[0][99'999].item<int>(), last + 100);
    if (rank > 0) {
      backend.send(one, 0, 3)->wait();
    } else {
      int seen = 0;
      for (int r = 1; r < size; ++r) {
        auto work = backend.recvAnysource(in_one, 3);
        work->wait();
        EXPECT_EQ(in_one[0][0].item<int>(), work->sourceRank());
        seen |= 1 << work->sourceRank();
      }
      EXPECT_EQ(seen, (1 << size) - 2);
    }
    Tensors sparse{at::eye(3).mul(rank).to_sparse()};
    backend.allreduce(sparse, {})->wait();
    expect_same(sparse[0].to_dense(), at::eye(3) * (size * (size - 1) / 2), "sparse");
    const at::NoGradGuard no_grad;
    Tensors leaf{at::eye(3).to_sparse().requires_grad_()};
    backend.allreduce(leaf, {})->wait();
    expect_same(leaf[0].to_dense(), at::eye(3) * size, "sparse leaf");
  }));
}

TEST(HierarchicalBackend, WithoutAHierarchyItIsTheSimplerBackend) {
  expect_ok(run("aaa", [](int, c10d::Backend& backend, const auto&) {
    EXPECT_EQ(backend.getBackendName(), "shm");
    backend.barrier({})->wait();
  }));
  expect_ok(run("ab", [](int, c10d::Backend& backend, const auto&) {
    EXPECT_EQ(backend.getBackendName(), "gloo");
    backend.barrier({})->wait();
  }));
}

TEST(HierarchicalBackend, AsynchronousCallsKeepTheirOrderAndResolveTheirFutures) {
  expect_ok(run("aabb", [](int rank, c10d::Backend& backend, const auto&) {
    constexpr int kCalls = 40, size = 4;
    std::vector<Tensors> data;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::atomic<int> called{0};
    for (int i = 0; i < kCalls; ++i) data.push_back({at::full({i * 1000 + 1}, rank + i)});
    for (int i = 0; i < kCalls; ++i) {
      works.push_back(backend.allreduce(data[static_cast<size_t>(i)], {}));
      works.back()->getFuture()->addCallback([&](c10::ivalue::Future&) { ++called; });
    }
    // A call that blocks comes after those that do not.
    Tensors last{at::full({1}, kCalls)};
    c10d::AllreduceOptions blocking;
    blocking.asyncOp = false;
    auto end = backend.allreduce(last, blocking);
    EXPECT_TRUE(end->isCompleted());
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

TEST(HierarchicalBackend, AGroupCanBeUsedFromACallback) {
  expect_ok(run("aab", [](int, c10d::Backend& backend, const auto&) {
    Tensors first{at::ones({100'000})}, second{at::ones({3})};
    auto work = backend.allreduce(first, {});
    auto after = work->getFuture()->then(
        [&](c10::ivalue::Future&) {
          c10d::AllreduceOptions options;
          options.asyncOp = false;
          backend.allreduce(second, options)->wait();
          return c10::IValue(1);
        },
        c10::IntType::get());
    after->wait();
    expect_same(second[0], at::full({3}, 3.0), "second");
  }));
}

void all_reduce(c10d::Backend& backend, at::Tensor tensor, Op op = Op::SUM) {
  Tensors tensors{std::move(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  backend.allreduce(tensors, options)->wait();
}
void broadcast(c10d::Backend& backend, at::Tensor tensor, int root) {
  Tensors tensors{std::move(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  backend.broadcast(tensors, options)->wait();
}

void reduce(c10d::Backend& backend, at::Tensor tensor, int root = 0, Op op = Op::SUM) {
  Tensors tensors{std::move(tensor)};
  c10d::ReduceOptions options;
  options.rootRank = root;
  options.reduceOp = op;
  backend.reduce(tensors, options)->wait();
}
/// Each of four ranks sends the others `sent` rows and expects as many as `received` says.
void all_to_all(c10d::Backend& backend, std::vector<int64_t> sent, std::vector<int64_t> received) {
  const auto rows = [](const std::vector<int64_t>& splits) {
    return at::ones({splits[0] + splits[1] + splits[2] + splits[3]});
  };
  at::Tensor input = rows(sent), output = rows(received);
  backend.alltoall_base(output, input, received, sent, {})->wait();
}

struct Mistake {
  const char* name;
  std::function<void(int rank, c10d::Backend&)> call;
  std::vector<std::string> texts;
};

class HostMistakes : public ::testing::TestWithParam<Mistake> {};

// Also after so many calls that no comparison of a group's first ones is left.
TEST_P(HostMistakes, AreToldToAllRanksOfAllHostsAndLeaveTheGroupUsable) {
  expect_ok(run("aabb", [](int rank, c10d::Backend& backend, const auto&) {
    for (int i = 0; i < 15; ++i) reduce(backend, at::ones({3}));
    try {
      GetParam().call(rank, backend);
      ADD_FAILURE() << "rank " << rank << " noticed nothing";
    } catch (const MismatchError& error) {
      for (const auto& text : GetParam().texts) EXPECT_THAT(error.what(), HasSubstr(text));
    }
    Tensors after{at::ones({400'000})};
    backend.allreduce(after, {})->wait();
    EXPECT_EQ(after[0][399'999].item<float>(), 4);
  }));
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, HostMistakes,
    ::testing::Values(
        Mistake{"ShapeWithinAHost",
                [](int rank, auto& backend) { all_reduce(backend, at::ones({rank == 1 ? 5 : 4})); },
                {"ranks 0, 2 and 3 called all_reduce(sum) of float32 [4]",
                 "rank 1 called all_reduce(sum) of float32 [5]"}},
        Mistake{
            "ShapeBetweenHosts",
            [](int rank, auto& backend) { all_reduce(backend, at::ones({rank < 2 ? 90'000 : 4})); },
            {"ranks 0 and 1 called all_reduce(sum) of float32 [90000]",
             "ranks 2 and 3 called all_reduce(sum) of float32 [4]"}},
        Mistake{"LargeShapes",
                [](int rank, auto& backend) {
                  all_reduce(backend, at::ones({rank == 3 ? 90'000 : 900'000}));
                },
                {"ranks 0, 1 and 2", "rank 3 called all_reduce(sum) of float32 [90000]"}},
        Mistake{"Dtype",
                [](int rank, auto& backend) {
                  all_reduce(backend, at::ones({4}, rank == 2 ? at::kInt : at::kFloat));
                },
                {"float32 [4]", "rank 2 called all_reduce(sum) of int32 [4]"}},
        Mistake{"Reduction",
                [](int rank, auto& backend) {
                  all_reduce(backend, at::ones({4}), rank == 0 ? Op::MAX : Op::SUM);
                },
                {"rank 0 called all_reduce(max)", "all_reduce(sum)"}},
        Mistake{"Root",
                [](int rank, auto& backend) {
                  broadcast(backend, at::ones({40'000}), rank < 2 ? 0 : 2);
                },
                {"broadcast(root 0)", "broadcast(root 2)"}},
        Mistake{"Operation",
                [](int rank, auto& backend) {
                  if (rank == 0) {
                    backend.barrier({})->wait();
                  } else {
                    all_reduce(backend, at::ones({100'000}));
                  }
                },
                {"rank 0 called barrier", "ranks 1, 2 and 3 called all_reduce(sum)"}},
        Mistake{"ReductionOfAReduce",
                [](int rank, auto& backend) {
                  reduce(backend, at::ones({4}), 1, rank == 3 ? Op::MAX : Op::SUM);
                },
                {"ranks 0, 1 and 2 called reduce(sum, root 1) of float32 [4] as collective 16",
                 "rank 3 called reduce(max, root 1)"}},
        Mistake{"DtypeAndRootOfAReduce",
                [](int rank, auto& backend) {
                  reduce(backend, at::ones({90'000}, rank == 2 ? at::kDouble : at::kFloat),
                         rank == 2 ? 1 : 0);
                },
                {"reduce(sum, root 0) of float32 [90000]",
                 "rank 2 called reduce(sum, root 1) of float64 [90000]"}},
        Mistake{"ShapeOfAGather",
                [](int rank, auto& backend) {
                  Tensors input{at::ones({rank == 1 ? 900 : 901})};
                  TensorLists outputs;
                  if (rank == 0) outputs.push_back(Tensors(4, at::empty({901})));
                  backend.gather(outputs, input, {})->wait();
                },
                {"gather(root 0) of float32 [901]", "float32 [900]"}},
        Mistake{"ShapeOfAScatter",
                [](int rank, auto& backend) {
                  Tensors output{at::empty({rank == 3 ? 5 : 4})};
                  TensorLists inputs;
                  if (rank == 0) inputs.push_back(Tensors(4, at::ones({4})));
                  backend.scatter(output, inputs, {})->wait();
                },
                {"rank 0", "rank 3 called scatter(root 0)", "float32 [5]"}},
        Mistake{"SplitsOfAnAllToAll",
                [](int rank, auto& backend) {
                  all_to_all(backend, {1, 2, 3, 4}, std::vector<int64_t>(4, rank + 1));
                  const std::vector<int64_t> even(4, 1), uneven{2, 0, 1, 1};
                  all_to_all(backend, rank == 2 ? uneven : even, even);
                },
                {"rank 2", "all_to_all_single", "collective 17", "shape"}},
        Mistake{"AllToAllAgainstBroadcast",
                [](int rank, auto& backend) {
                  if (rank == 2) {
                    all_to_all(backend, {1, 1, 1, 1}, {1, 1, 1, 1});
                  } else {
                    broadcast(backend, at::ones({4}), 0);
                  }
                },
                {"ranks 0, 1 and 3 called broadcast(root 0) of float32 [4] as collective 16",
                 "rank 2 called all_to_all_single"}}),
    [](const auto& info) { return info.param.name; });

TEST(HierarchicalBackend, ARankThatDoesNotComeIsNamedOnAllHosts) {
  for (const int late : {1, 3, 2}) {
    const auto outcomes = run(
        "aabb",
        [&](int rank, c10d::Backend& backend, const auto&) {
          all_reduce(backend, at::ones({2}));
          if (rank == late) return;
          all_reduce(backend, at::ones({4}));
        },
        500);
    EXPECT_TRUE(outcomes[static_cast<size_t>(late)].ok());
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == late) continue;
      const auto& outcome = outcomes[static_cast<size_t>(rank)];
      EXPECT_TRUE(outcome.is<TimeoutError>()) << outcome.text();
      EXPECT_THAT(outcome.text(), AllOf(HasSubstr("rank " + std::to_string(rank) +
                                                  ": all_reduce(sum) of float32 [4], collective 2"),
                                        HasSubstr("rank " + std::to_string(late) + " (process "),
                                        HasSubstr("within 0.5 s")));
    }
  }
}

TEST(HierarchicalBackend, ARankThatIsLateIsNotLost) {
  expect_ok(run(
      "aabb",
      [](int rank, c10d::Backend& backend, const auto&) {
        if (rank == 3) return;
        EXPECT_THROW(all_reduce(backend, at::ones({4})), TimeoutError);
        const auto& ours = dynamic_cast<const backends::TensorBackend&>(backend);
        EXPECT_EQ(ours.failure(), "");
        EXPECT_FALSE(ours.has_lost(3));
      },
      500));
}

// As a leader tells its host of it, for new groups, who wait for ranks that do not lead as well.
TEST(HierarchicalBackend, WithAHostAllItsRanksAreLost) {
  for (const bool late : {false, true}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::unique_ptr<Hierarchy>> ends(4);
    expect_ok(testing::run_ranks(4, [&](int rank) {
      const auto options = options_of(store, "aabb", rank, std::chrono::milliseconds(20'000));
      const auto checks = std::make_shared<CheckContext>(
          c10::make_intrusive<c10d::PrefixStore>("flat", options.store), rank, options.size,
          options.global_ranks, options.group_name, options.timeout);
      checks->connect();
      ends[static_cast<size_t>(rank)] = std::make_unique<Hierarchy>(
          options, HostLayout::of({"a", "a", "b", "b"}, rank), meet(options), checks);
    }));
    ends[0]->local().give_up(late ? shm::Verdict::timed_out : shm::Verdict::lost,
                             with_process("rank 2", process_identity()) +
                                 ", which speaks for ranks 2 and 3 of its host, has ended or "
                                 "cannot be reached any more [closed]");
    for (const int rank : {0, 1}) EXPECT_FALSE(ends[1]->has_lost(rank));
    for (const int rank : {2, 3}) EXPECT_EQ(ends[1]->has_lost(rank), !late);
    for (const size_t rank : {3, 2, 1, 0}) ends[rank]->leave();
  }
}

TEST(HierarchicalBackend, AHostOfWhichNobodyComesIsNamed) {
  const auto outcomes = run(
      "aabb",
      [&](int rank, c10d::Backend& backend, const auto&) {
        all_reduce(backend, at::ones({2}));
        if (rank < 2) all_reduce(backend, at::ones({400'000}));
      },
      500);
  for (const size_t rank : {0, 1}) {
    EXPECT_TRUE(outcomes[rank].is<TimeoutError>()) << outcomes[rank].text();
    EXPECT_THAT(outcomes[rank].text(),
                AllOf(HasSubstr("rank 2 (process "), HasSubstr("ranks 2 and 3 of its host")));
  }
}

TEST(HierarchicalBackend, ARankThatLeavesFailsTheOthersAtOnce) {
  for (const int leaver : {0, 1, 3}) {
    const auto started = std::chrono::steady_clock::now();
    const auto outcomes = run("aabb", [&](int rank, c10d::Backend& backend, const auto&) {
      all_reduce(backend, at::ones({2}));
      if (rank == leaver) return backend.shutdown();
      all_reduce(backend, at::ones({400'000}));
    });
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == leaver) continue;
      const auto& outcome = outcomes[static_cast<size_t>(rank)];
      EXPECT_TRUE(outcome.is<PeerLostError>()) << outcome.text();
      EXPECT_THAT(outcome.text(), HasSubstr("rank " + std::to_string(leaver) + " (process "));
    }
    EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds(10));
  }
}

TEST(HierarchicalBackend, AnAbortFailsTheOthersAndWhatIsUnderWay) {
  for (const int aborter : {0, 3}) {
    const auto outcomes = run("aabb", [&](int rank, c10d::Backend& backend, const auto&) {
      if (rank == aborter) {
        Tensors mine{at::ones({400'000})};
        auto work = backend.allreduce(mine, {});
        if (aborter == 3) work->wait();
        backend.abort();
        return;
      }
      all_reduce(backend, at::ones({400'000}));
      all_reduce(backend, at::ones({4}));
    });
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == aborter) continue;
      const auto& outcome = outcomes[static_cast<size_t>(rank)];
      EXPECT_TRUE(outcome.is<PeerLostError>()) << outcome.text();
      EXPECT_THAT(outcome.text(), HasSubstr("has given the group up"));
    }
  }
}

// Ranks that wait for messages only, which go by the group over Gloo: nothing is under way between
// the leaders, and the peer that is waited for is on the other host and alive.
TEST(HierarchicalBackend, AHostThatIsLostEndsWaitsForMessages) {
  const auto started = std::chrono::steady_clock::now();
  const auto outcomes = run("aabb", [&](int rank, c10d::Backend& backend, const auto&) {
    all_reduce(backend, at::ones({2}));
    if (rank == 2) return backend.abort();
    if (rank == 3) return;
    Tensors incoming{at::empty({4})};
    backend.recv(incoming, 3, 0)->wait();
  });
  for (const size_t rank : {0, 1}) {
    EXPECT_TRUE(outcomes[rank].is<PeerLostError>()) << outcomes[rank].text();
    EXPECT_THAT(outcomes[rank].text(), AllOf(HasSubstr("rank 2 (process "),
                                             HasSubstr("called recv(from rank 3) of float32 [4]")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds(15));
}

TEST(HierarchicalBackend, AHostThatIsLostEndsAGather) {
  const auto outcomes = run("aabb", [&](int rank, c10d::Backend& backend, const auto&) {
    all_reduce(backend, at::ones({2}));
    if (rank == 2) return backend.abort();
    if (rank == 3) return;
    TensorLists outputs;
    if (rank == 0) outputs.push_back(Tensors(4, at::empty({4})));
    Tensors input{at::ones({4})};
    backend.gather(outputs, input, {})->wait();
  });
  for (const size_t rank : {0, 1}) {
    EXPECT_TRUE(outcomes[rank].is<PeerLostError>()) << outcomes[rank].text();
    EXPECT_THAT(outcomes[rank].text(), HasSubstr("rank 2"));
  }
}

// Host b's leader meets the others and goes no further: Gloo waits for it between the hosts.
TEST(HierarchicalBackend, FormingBetweenHostsTakesTheTimeOutAndNamesAHostThatWasLost) {
  for (const bool lost : {false, true}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::unique_ptr<Lifeline> lifeline;
    auto outcomes = testing::run_ranks(3, [&](int rank) {
      const auto options = options_of(store, "aab", rank, std::chrono::milliseconds(1'500));
      if (rank < 2) {
        make(options);
        return;
      }
      meet(options);
      Lifeline::Options line;
      line.store = c10::make_intrusive<c10d::PrefixStore>("lifeline", options.store);
      line.host = 1;
      line.names = {"host a", "host b"};
      lifeline = std::make_unique<Lifeline>(line);
      if (lost) lifeline.reset();
    });
    EXPECT_TRUE(outcomes[2].ok()) << outcomes[2].text();
    outcomes.pop_back();
    for (const auto& outcome : outcomes) EXPECT_FALSE(outcome.ok());
    if (!lost) continue;
    EXPECT_TRUE(outcomes[0].is<PeerLostError>()) << outcomes[0].text();
    EXPECT_THAT(outcomes[0].text(), HasSubstr("rank 2 (process "));
  }
}

TEST(HierarchicalBackend, MisuseIsAnErrorOfThisRankAlone) {
  expect_ok(run("aab", [](int, c10d::Backend& backend, const auto&) {
    EXPECT_THROW(all_reduce(backend, at::ones({2}), Op::BAND), UsageError);
    EXPECT_THROW(broadcast(backend, at::ones({2}), 3), UsageError);
    EXPECT_THROW(broadcast(backend, at::ones({2}).to_sparse(), 0), UsageError);
    Tensors two{at::ones({1}), at::ones({1})};
    EXPECT_THROW(backend.allreduce(two, {}), UsageError);
    backend.barrier({})->wait();
  }));
}

size_t entries(const char* folder) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

TEST(HierarchicalBackend, GroupsLeaveNoThreadAndNoDescriptorBehind) {
  const auto some = [](int groups) {
    for (int i = 0; i < groups; ++i)
      expect_ok(run("aabb", [](int, c10d::Backend& backend, const auto&) {
        Tensors data{at::ones({400'000})};
        backend.allreduce(data, {})->wait();
      }));
  };
  some(2);  // What LibTorch keeps once and for all.
  const size_t threads = entries("/proc/self/task"), descriptors = entries("/proc/self/fd");
  some(10);
  // A detached thread of Gloo's may be about to end.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (entries("/proc/self/task") > threads && std::chrono::steady_clock::now() < deadline)
    std::this_thread::yield();
  EXPECT_LE(entries("/proc/self/task"), threads);
  EXPECT_LE(entries("/proc/self/fd"), descriptors + 2);
}

}  // namespace
}  // namespace lockstep::hierarchical
