// The queue above shared memory and the hierarchy: ranks are threads, which call from several
// threads of their own, wait elsewhere than they call, and are called back.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/comm/backend_registry.h"
#include "tests/support/run_ranks.h"

namespace lockstep {
namespace backends_test {

using test::run_ranks;
using Tensors = std::vector<at::Tensor>;

c10::intrusive_ptr<c10d::Work> all_reduce(c10d::Backend& backend, Tensors& tensors, bool async) {
  c10d::AllreduceOptions options;
  options.asyncOp = async;
  return backend.allreduce(tensors, options);
}

/// Calls that end in their caller, in the queue's thread, and that another thread waits for.
void call_in_every_way(c10d::Backend& backend, int size) {
  std::atomic<int> called_back{0};
  constexpr int kRounds = 20;
  for (int round = 0; round < kRounds; ++round) {
    // One that travels with the announcement, one that is cut into pieces.
    std::vector<Tensors> all;
    for (const int64_t count : {3, 300'000}) all.push_back({at::ones({count})});
    auto first = all_reduce(backend, all[0], /*async=*/true);
    auto second = all_reduce(backend, all[1], /*async=*/true);
    second->getFuture()->addCallback([&](c10::ivalue::Future&) { ++called_back; });
    std::thread other([&] { second->wait(kNoTimeout); });
    first->wait(kNoTimeout);
    Tensors last{at::ones({5})};
    if (auto work = all_reduce(backend, last, /*async=*/false)) work->wait(kNoTimeout);
    other.join();
    for (const auto& tensors : all) ASSERT_EQ(tensors[0].max().item<float>(), size);
    ASSERT_EQ(last[0][4].item<float>(), size);
  }
  backend.barrier(c10d::BarrierOptions())->wait(kNoTimeout);
  EXPECT_EQ(called_back, kRounds);
}

/// Every rank sends to the next while collectives are under way.
void send_around(c10d::Backend& backend, int rank, int size) {
  for (int round = 0; round < 10; ++round) {
    for (const int64_t count : {2, 50'000}) {
      Tensors mine{at::ones({count}) * rank}, theirs{at::zeros({count})}, sum{at::ones({count})};
      auto reduced = all_reduce(backend, sum, /*async=*/true);
      auto sent = backend.send(mine, (rank + 1) % size, round);
      backend.recv(theirs, (rank + size - 1) % size, round)->wait(kNoTimeout);
      sent->wait(kNoTimeout);
      reduced->wait(kNoTimeout);
      ASSERT_EQ(theirs[0][1].item<float>(), static_cast<float>((rank + size - 1) % size));
    }
  }
}

/// `hosts`: the host of each rank.
void run(const std::string& name, const std::string& hosts) {
  const int size = static_cast<int>(hosts.size());
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<c10::intrusive_ptr<c10d::Backend>> backends(hosts.size());
  const auto outcomes = run_ranks(size, [&](int rank) {
    BackendOptions options;
    options.store = c10::make_intrusive<c10d::PrefixStore>(name, store);
    options.rank = rank;
    options.size = size;
    options.host = hosts.substr(static_cast<size_t>(rank), 1);
    for (int i = 0; i < size; ++i) options.global_ranks.push_back(i);
    auto& backend = backends[static_cast<size_t>(rank)];
    backend = make_backend(name, options).backend;
    call_in_every_way(*backend, size);
    send_around(*backend, rank, size);
  });
  for (const auto& outcome : outcomes) EXPECT_TRUE(outcome.ok()) << outcome.text();
  for (auto& backend : backends) backend->shutdown();
}

TEST(Queue, RunsWhatThreadsCallInEveryWay) {
  run("shm", "aaa");
}

TEST(Hierarchy, OfTwoHostsRunsWhatThreadsCallInEveryWay) {
  run("hierarchical", "aabb");
}

}  // namespace backends_test
}  // namespace lockstep
