// The hierarchical backend against ATen's and Gloo's results.
#include "lockstep/comm/backends/hierarchical/hierarchy.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <random>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/process_identity.h"
#include "lockstep/comm/backends/hierarchical/host_collectives.h"
#include "tests/support/run_hosts.h"
#include "tests/support/whole_numbers.h"

namespace lockstep::hierarchical {
namespace hierarchical_backend_test {

using test::expect_ok;
using test::expect_same;
using test::whole_numbers;
using Op = c10d::ReduceOp::RedOpType;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

uint64_t seed_of_run() {
  if (const auto given = env_string("LOCKSTEP_TEST_SEED")) return std::stoull(*given);
  return std::random_device()();
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
  expect_ok(run(hosts, [&](int rank, c10d::Backend& ours, const test::StorePtr& store) {
    EXPECT_EQ(ours.getBackendName(), "hierarchical");
    auto gloo = test::make_gloo(store->clone(), rank, size, std::chrono::seconds(20));
    std::mt19937_64 random(seed);
    uint64_t call = seed;
    size_t next = random() % kSizes.size();
    for (const auto type : types) {
      for (const auto op : {Op::SUM, Op::AVG, Op::PRODUCT, Op::MIN, Op::MAX}) {
        // The short form draws two of five.
        if (random() % 5 > 1 && !env_flag("LOCKSTEP_LONG_TESTS")) continue;
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

}  // namespace hierarchical_backend_test
}  // namespace lockstep::hierarchical
