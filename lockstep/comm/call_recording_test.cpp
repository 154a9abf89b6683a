// Each call shows in LibTorch's traces, once for each rank, with its tensors. (mpi:
// mpi_works_test.cpp.)
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>

#include "tests/support/run_group.h"
#include "tests/support/test_wait.h"
#include "tests/support/watched_calls.h"

namespace lockstep {
namespace call_recording_test {

using Shapes = std::vector<std::vector<int64_t>>;
using Tensors = std::vector<at::Tensor>;

struct Recorded {
  const char* name;
  Shapes shapes;
  std::function<void(const ProcessGroup&)> call;
};

Tensors one_each(const ProcessGroup& group) {
  Tensors list;
  for (int rank = 0; rank < group.size(); ++rank) list.push_back(at::ones({4}));
  return list;
}

std::vector<Recorded> collectives() {
  const Shapes one{{4}}, each{{4}, {4}, {4}};
  const auto on = [](auto call) {
    return [call](const ProcessGroup& group) {
      at::Tensor tensor = at::ones({4}), all = at::ones({12});
      Tensors list = one_each(group);
      call(group, tensor, all, list);
    };
  };
  return {
      {"all_reduce", one, on([](auto& g, auto& t, auto&, auto&) { g.all_reduce(t); })},
      {"all_reduce_coalesced", each,
       on([](auto& g, auto&, auto&, auto& l) { g.all_reduce_coalesced(l); })},
      {"reduce", one, on([](auto& g, auto& t, auto&, auto&) { g.reduce(t, 1); })},
      {"broadcast", one, on([](auto& g, auto& t, auto&, auto&) { g.broadcast(t, 1); })},
      {"all_gather", one, on([](auto& g, auto& t, auto&, auto& l) { g.all_gather(l, t); })},
      {"all_gather_into_tensor", one,
       on([](auto& g, auto& t, auto& a, auto&) { g.all_gather_into_tensor(a, t); })},
      {"gather", one, on([](auto& g, auto& t, auto&, auto& l) {
         Tensors outputs = g.rank() == 1 ? l : Tensors();
         g.gather(outputs, t, 1);
       })},
      {"reduce_scatter", each,
       on([](auto& g, auto& t, auto&, auto& l) { g.reduce_scatter(t, l); })},
      {"reduce_scatter_tensor", {{12}}, on([](auto& g, auto& t, auto& a, auto&) {
         g.reduce_scatter_tensor(t, a);
       })},
      {"all_to_all", each, on([](auto& g, auto&, auto&, auto& l) { g.all_to_all(l, l); })},
      {"all_to_all_single", {{12}}, on([](auto& g, auto&, auto& a, auto&) {
         at::Tensor output = at::zeros({12});
         g.all_to_all_single(output, a);
       })},
      {"barrier", {}, on([](auto& g, auto&, auto&, auto&) { g.barrier(); })},
  };
}

class CallsOf : public ::testing::TestWithParam<test::RankOptions> {};

TEST_P(CallsOf, ShowsEachCollectiveOnceWithItsTensors) {
  test::WatchedCalls watched(GetParam().backend);
  for (const auto& one : collectives()) {
    test::run_group(
        3, [&](const ProcessGroup& group) { one.call(group); }, GetParam());
    const auto seen = watched.seen();
    ASSERT_EQ(seen.size(), 3) << one.name;
    for (const auto& call : seen) {
      EXPECT_EQ(call.name, GetParam().backend + ":" + one.name);
      EXPECT_EQ(call.shapes, one.shapes) << one.name;
      EXPECT_TRUE(call.ended) << one.name;
    }
    watched.forget();
  }
}

TEST_P(CallsOf, TellTheirSizes) {
  test::WatchedCalls watched(GetParam().backend);
  test::run_group(
      3,
      [](const ProcessGroup& group) {
        at::Tensor output = at::zeros({12});
        group.all_gather_into_tensor(output, at::ones({4}));
      },
      GetParam());
  const test::WatchedSizes one{"all_gather_into_tensor", 4, 12};
  EXPECT_EQ(watched.sizes(), std::vector<test::WatchedSizes>(3, one));
}

// Rank 0's call is under way until rank 1 comes.
TEST_P(CallsOf, EndsWhenTheWorkDoes) {
  test::WatchedCalls watched(GetParam().backend);
  std::atomic<bool> seen{false};
  test::run_group(
      3,
      [&](const ProcessGroup& group) {
        at::Tensor tensor = at::ones({4});
        if (group.rank() > 0) test_wait::wait_until([&] { return seen.load(); }, "rank 0's look");
        const Work work = group.all_reduce_async(tensor);
        if (group.rank() == 0) {
          const auto calls = watched.seen();
          EXPECT_EQ(calls.size(), 1);
          EXPECT_TRUE(calls.empty() || !calls[0].ended);
          seen = true;
        }
        work.wait();
        group.barrier();
        // All ranks' works have ended and still live.
        for (const auto& call : watched.seen())
          EXPECT_TRUE(call.ended || call.name == GetParam().backend + ":barrier") << call.name;
        group.barrier();
      },
      GetParam());
  EXPECT_EQ(watched.seen().size(), 9);
}

// hierarchical's messages are Gloo's, which records them itself.
TEST(CallRecording, ShowsMessagesOfSharedMemory) {
  test::WatchedCalls watched("shm");
  test::run_group(2,
                  [](const ProcessGroup& group) {
                    at::Tensor tensor = at::ones({5});
                    if (group.rank() == 0) {
                      group.send(tensor, 1);
                      group.isend(tensor, 1, 2).wait();
                    } else {
                      group.recv(tensor, 0);
                      group.recv_any(tensor, 2);
                    }
                  },
                  {.backend = "shm"});
  const auto calls = watched.seen();
  const std::vector<std::string> names{"shm:recv", "shm:recvAnySource", "shm:send", "shm:send"};
  ASSERT_EQ(calls.size(), names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(calls[i].name, names[i]);
    EXPECT_EQ(calls[i].shapes, (Shapes{{5}}));
    EXPECT_TRUE(calls[i].ended) << names[i];
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, CallsOf,
                         ::testing::Values(test::RankOptions{.backend = "shm"},
                                           test::RankOptions{.backend = "hierarchical",
                                                             .hosts = "aab"}),
                         [](const auto& backend) { return backend.param.backend; });

}  // namespace call_recording_test
}  // namespace lockstep
