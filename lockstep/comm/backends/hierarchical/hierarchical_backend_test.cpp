// The hierarchical backend against ATen's and Gloo's results. Ranks are threads, and hosts are
// declared by hand.
#include "lockstep/comm/backends/hierarchical/hierarchical_backend.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <random>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/backends/hierarchical/hierarchical.h"
#include "lockstep/comm/rank_threads.h"

namespace lockstep::hierarchical {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Outcome;
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
  std::vector<Outcome> outcomes(hosts.size());
  std::vector<testing::BackendPtr> backends(hosts.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank) {
    threads.emplace_back([&, rank] {
      const auto index = static_cast<size_t>(rank);
      try {
        backends[index] =
            make(options_of(store, hosts, rank, std::chrono::milliseconds(milliseconds)));
        part(rank, *backends[index], store);
      } catch (...) {
        outcomes[index].error = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  // In any order, as processes end.
  for (auto& backend : backends)
    if (backend) backend->shutdown();
  return outcomes;
}

void expect_ok(const std::vector<Outcome>& outcomes) {
  for (const auto& outcome : outcomes) EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// Small whole numbers: sums and products are exact in every type and order.
at::Tensor whole_numbers(uint64_t seed, int rank, at::IntArrayRef shape, at::ScalarType type) {
  auto generator =
      at::make_generator<at::CPUGeneratorImpl>(seed * 64 + static_cast<uint64_t>(rank));
  const int64_t low = type == at::kByte || type == at::kBool ? 0 : -2;
  return at::randint(low, type == at::kBool ? 2 : 3, shape, generator, at::kLong).to(type);
}

void expect_same(const at::Tensor& actual, const at::Tensor& wanted, const std::string& what) {
  EXPECT_TRUE(actual.equal(wanted)) << what << "\n"
                                    << actual.flatten().slice(0, 0, 8) << "\n"
                                    << wanted.flatten().slice(0, 0, 8);
}

class Placements : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Hosts, Placements,
                         ::testing::Values("aabb", "aaab", "aabbc", "abab", "abcab", "aab"),
                         [](const auto& info) { return info.param; });

// In bytes: what travels with the comparison, pieces of the least size, many of the largest.
const std::vector<int64_t> kSizes = {0,
                                     1,
                                     13,
                                     251,
                                     252,
                                     253,
                                     1000,
                                     (128 << 10) / 4 - 1,
                                     (128 << 10) / 4,
                                     (128 << 10) / 4 + 1,
                                     (1 << 20) / 4 + 1,
                                     5 * (1 << 20) / 4 + 3};

TEST_P(Placements, EveryCollectiveGivesGloosResult) {
  const std::string hosts = GetParam();
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

}  // namespace
}  // namespace lockstep::hierarchical
