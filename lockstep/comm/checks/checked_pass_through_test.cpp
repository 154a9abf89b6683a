// The checked backend gives what the backend inside gives, and costs next to nothing.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lockstep/base/error.h"
#include "lockstep/comm/checks/checked_backend.h"
#include "tests/support/run_backends.h"

namespace lockstep {
namespace checked_pass_through_test {

using c10d::Backend;
using test::BackendPtr;
using test::expect_ok;
using test::run_gloo;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

CheckedBackendOptions options_of(DebugLevel debug) {
  CheckedBackendOptions options;
  options.debug = debug;
  options.timeout = std::chrono::milliseconds(20'000);
  return options;
}

at::Tensor input_of(int rank, int64_t n) {
  return at::arange(n, at::kFloat).mul_(0.37).add_(static_cast<double>(rank) * 1.7);
}

/// Runs every collective of Gloo and returns all that came out.
Tensors every_collective(int rank, int size, Backend& backend) {
  Tensors results;
  const auto keep = [&](const Tensors& tensors) {
    for (const auto& tensor : tensors) results.push_back(tensor.clone());
  };
  const auto copies = [&](int64_t n) {
    Tensors list;
    for (int i = 0; i < size; ++i) list.push_back(at::zeros({n}));
    return list;
  };
  {
    Tensors tensors{input_of(rank, 5)};
    backend.allreduce(tensors, {})->wait();
    keep(tensors);
    backend.broadcast(tensors, {})->wait();
    keep(tensors);
  }
  {
    Tensors tensors{input_of(rank, 3), input_of(rank, 4)};
    backend.allreduce_coalesced(tensors, {})->wait();
    keep(tensors);
  }
  {
    Tensors tensors{input_of(rank, 4)};
    c10d::ReduceOptions options;
    options.rootRank = 1;
    backend.reduce(tensors, options)->wait();
    if (rank == 1) keep(tensors);
  }
  {
    auto indices = at::tensor({int64_t{0}, int64_t{rank + 1}}).reshape({1, 2});
    Tensors tensors{at::sparse_coo_tensor(indices, input_of(rank, 2), {6})};
    auto work = backend.allreduce_sparse(tensors, {});
    work->wait();
    keep({work->result().at(0).to_dense()});
  }
  {
    TensorLists outputs{copies(3)};
    Tensors inputs{input_of(rank, 3)};
    backend.allgather(outputs, inputs, {})->wait();
    keep(outputs[0]);
  }
  {
    auto output = at::zeros({3 * size});
    auto input = input_of(rank, 3);
    backend._allgather_base(output, input, {})->wait();
    keep({output});
  }
  {
    TensorLists outputs;
    for (int i = 0; i < size; ++i) outputs.push_back({at::zeros({2}), at::zeros({3})});
    Tensors inputs{input_of(rank, 2), input_of(rank, 3)};
    backend.allgather_coalesced(outputs, inputs, {})->wait();
    for (const auto& list : outputs) keep(list);
  }
  {
    Tensors outputs{at::zeros({2 * size}), at::zeros({3 * size})};
    Tensors inputs{input_of(rank, 2), input_of(rank, 3)};
    backend.allgather_into_tensor_coalesced(outputs, inputs, {})->wait();
    keep(outputs);
  }
  {
    TensorLists outputs;
    if (rank == 0) outputs = {copies(2)};
    Tensors inputs{input_of(rank, 2)};
    backend.gather(outputs, inputs, {})->wait();
    if (rank == 0) keep(outputs[0]);
  }
  {
    TensorLists inputs;
    if (rank == 0) {
      inputs = {{}};
      for (int i = 0; i < size; ++i) inputs[0].push_back(input_of(i, 2));
    }
    Tensors outputs{at::zeros({2})};
    backend.scatter(outputs, inputs, {})->wait();
    keep(outputs);
  }
  {
    auto input = input_of(rank, 2 * size);
    auto output = at::zeros({2});
    backend._reduce_scatter_base(output, input, {})->wait();
    keep({output});
  }
  {
    TensorLists inputs{{}};
    for (int i = 0; i < size; ++i) inputs[0].push_back(input_of(rank + i, 3));
    Tensors outputs{at::zeros({3})};
    backend.reduce_scatter(outputs, inputs, {})->wait();
    keep(outputs);
  }
  {
    Tensors inputs{input_of(rank, 2 * size)};
    Tensors outputs{at::zeros({2})};
    backend.reduce_scatter_tensor_coalesced(outputs, inputs, {})->wait();
    keep(outputs);
  }
  {
    auto input = input_of(rank, 2 * size);
    auto output = at::zeros({2 * size});
    std::vector<int64_t> even;
    backend.alltoall_base(output, input, even, even, {})->wait();
    keep({output});
  }
  {
    // Rank r sends j + 1 rows to rank j.
    std::vector<int64_t> input_splits;
    for (int i = 0; i < size; ++i) input_splits.push_back(i + 1);
    std::vector<int64_t> output_splits(static_cast<size_t>(size), rank + 1);
    auto input = input_of(rank, size * (size + 1) / 2);
    auto output = at::zeros({size * (rank + 1)});
    backend.alltoall_base(output, input, output_splits, input_splits, {})->wait();
    keep({output});
  }
  backend.barrier({})->wait();
  c10d::BarrierOptions barrier;
  barrier.timeout = std::chrono::seconds(20);
  backend.monitoredBarrier(barrier, false);
  return results;
}

class CheckedPassThrough : public ::testing::TestWithParam<DebugLevel> {};

TEST_P(CheckedPassThrough, EveryCollectiveGivesTheBackendsBits) {
  constexpr int kSize = 2;
  std::vector<Tensors> checked(kSize), plain(kSize);
  expect_ok(run_gloo(kSize, options_of(GetParam()), [&](int rank, Backend& backend) {
    checked[static_cast<size_t>(rank)] = every_collective(rank, kSize, backend);
  }));
  expect_ok(run_gloo(kSize, options_of(DebugLevel::off), [&](int rank, Backend& backend) {
    const auto inner = unchecked_backend(test::handle_of(backend));
    plain[static_cast<size_t>(rank)] = every_collective(rank, kSize, *inner);
  }));
  for (size_t rank = 0; rank < kSize; ++rank) {
    ASSERT_EQ(checked[rank].size(), plain[rank].size());
    for (size_t i = 0; i < plain[rank].size(); ++i)
      EXPECT_TRUE(checked[rank][i].equal(plain[rank][i])) << "rank " << rank << ", result " << i;
  }
}

TEST_P(CheckedPassThrough, ManyInFlightStayInOrder) {
  expect_ok(run_gloo(3, options_of(GetParam()), [](int rank, Backend& backend) {
    std::vector<Tensors> tensors;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int i = 0; i < 40; ++i) {
      tensors.push_back({at::full({i + 1}, static_cast<double>(rank + i), at::kFloat)});
      works.push_back(backend.allreduce(tensors.back(), {}));
    }
    for (size_t i = 0; i < works.size(); ++i) {
      works[i]->wait();
      EXPECT_TRUE(works[i]->isCompleted());
      EXPECT_TRUE(works[i]->isSuccess());
      EXPECT_EQ(works[i]->exception(), nullptr);
      EXPECT_EQ(tensors[i][0][0].item<double>(), 3.0 + 3.0 * static_cast<double>(i));
    }
  }));
}

TEST_P(CheckedPassThrough, FutureHoldsTheSameTensors) {
  expect_ok(run_gloo(2, options_of(GetParam()), [](int rank, Backend& backend) {
    Tensors tensors{at::ones({3})};
    auto work = backend.allreduce(tensors, {});
    auto future = work->getFuture();
    EXPECT_EQ(future, work->getFuture());
    future->wait();
    const auto values = future->value().toTensorVector();
    ASSERT_EQ(values.size(), 1u);
    EXPECT_TRUE(values[0].is_same(tensors[0]));
    EXPECT_EQ(values[0][2].item<float>(), 2);
    work->wait();
    EXPECT_EQ(work->result().size(), 1u);
  }));
}

/// What c10d's Reducer does with a bucket: on another thread, through a ProcessGroup, with the
/// future and a callback on it. (The real one passes through in the tests of room parallel.)
at::Tensor reduced_bucket(int rank, const BackendPtr& backend) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, backend->getSize());
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::GLOO, backend);
  group->setDefaultBackend(c10d::ProcessGroup::GLOO);
  at::Tensor result;
  std::thread autograd([&] {
    for (int step = 0; step < 15; ++step) {
      Tensors bucket{input_of(rank, 8) / 2};
      auto averaged = group->allreduce(bucket)->getFuture()->then(
          [](c10::ivalue::Future& done) {
            return c10::IValue(done.value().toTensorVector().at(0));
          },
          c10::TensorType::get());
      averaged->wait();
      result = averaged->value().toTensor().clone();
    }
  });
  autograd.join();
  return result;
}

TEST_P(CheckedPassThrough, ReducersWayOfCalling) {
  std::vector<at::Tensor> checked(2), plain(2);
  expect_ok(run_gloo(2, options_of(GetParam()), [&](int rank, Backend& backend) {
    checked[static_cast<size_t>(rank)] = reduced_bucket(rank, test::handle_of(backend));
  }));
  expect_ok(run_gloo(2, options_of(DebugLevel::off), [&](int rank, Backend& backend) {
    plain[static_cast<size_t>(rank)] =
        reduced_bucket(rank, unchecked_backend(test::handle_of(backend)));
  }));
  ASSERT_TRUE(checked[0].defined());
  EXPECT_TRUE(checked[0].equal(plain[0]));
  EXPECT_TRUE(checked[1].equal(checked[0]));
}

INSTANTIATE_TEST_SUITE_P(Levels, CheckedPassThrough,
                         ::testing::Values(DebugLevel::off, DebugLevel::info, DebugLevel::detail),
                         [](const auto& info) {
                           return info.param == DebugLevel::off    ? "off"
                                  : info.param == DebugLevel::info ? "info"
                                                                   : "detail";
                         });

TEST(CheckedBackend, SaysWhatTheInnerOneSays) {
  expect_ok(run_gloo(2, options_of(DebugLevel::info), [](int rank, Backend& backend) {
    EXPECT_EQ(backend.getBackendName(), "gloo");
    EXPECT_EQ(backend.getRank(), rank);
    EXPECT_EQ(backend.getSize(), 2);
    EXPECT_FALSE(backend.supportsCoalescing());
    EXPECT_EQ(backend.getBackendOptions()->timeout, std::chrono::seconds(20));
    backend.setTimeout(std::chrono::seconds(9));
    EXPECT_EQ(backend.getBackendOptions()->timeout, std::chrono::seconds(9));
    backend.setSequenceNumberForGroup();
    const auto before = backend.getSequenceNumberForGroup();
    backend.barrier({})->wait();
    EXPECT_EQ(backend.getSequenceNumberForGroup(), before + 1);
    EXPECT_THROW(backend.startCoalescing(), c10::Error);
  }));
}

TEST(CheckedBackend, MistakesOfUsePassAsTheyAre) {
  expect_ok(run_gloo(1, options_of(DebugLevel::info), [](int, Backend& backend) {
    Tensors none;
    EXPECT_THROW(backend.allreduce(none, {}), c10::Error);
  }));
}

TEST(CheckedBackend, WriteToALostPeerDoesNotEndTheProcess) {
  std::signal(SIGPIPE, SIG_DFL);
  expect_ok(run_gloo(1, options_of(DebugLevel::info), [](int, Backend&) {}));
  EXPECT_EQ(std::signal(SIGPIPE, SIG_DFL), SIG_IGN);
  const auto own_handler = [](int) {};
  std::signal(SIGPIPE, own_handler);
  expect_ok(run_gloo(1, options_of(DebugLevel::info), [](int, Backend&) {}));
  EXPECT_EQ(std::signal(SIGPIPE, SIG_IGN), static_cast<void (*)(int)>(own_handler));
}

TEST(CheckedBackend, GroupOfOneAsksNobody) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  expect_ok(run_gloo(
      1, options_of(DebugLevel::detail),
      [&](int, Backend& backend) {
        const auto keys = store->getNumKeys();
        Tensors tensors{at::ones({2})};
        backend.allreduce(tensors, {})->wait();
        backend.barrier({})->wait();
        EXPECT_EQ(store->getNumKeys(), keys);
      },
      store));
}

TEST(CheckedBackend, ComparisonsLeaveNoKeysBehind) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<int64_t> early{0}, late{0};
  expect_ok(run_gloo(
      2, options_of(DebugLevel::detail),
      [&](int rank, Backend& backend) {
        const auto work = [&](int count) {
          for (int i = 0; i < count; ++i) {
            Tensors tensors{at::ones({2})};
            backend.allreduce(tensors, {})->wait();
            (rank == 0 ? backend.send(tensors, 1, 0) : backend.recv(tensors, 0, 0))->wait();
          }
          backend.barrier({})->wait();
        };
        work(3);
        if (rank == 0) early = store->getNumKeys();
        work(50);
        if (rank == 0) late = store->getNumKeys();
        backend.barrier({})->wait();
      },
      store));
  // The last message's two keys may or may not be gone at either moment.
  EXPECT_LE(late, early + 2);
}

}  // namespace checked_pass_through_test
}  // namespace lockstep
