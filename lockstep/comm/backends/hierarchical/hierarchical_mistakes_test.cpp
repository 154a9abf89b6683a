// What becomes of calls that differ between ranks, and of misuse, over hosts that are joined.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "tests/support/run_hosts.h"

namespace lockstep::hierarchical {
namespace hierarchical_mistakes_test {

using test::expect_ok;
using ::testing::HasSubstr;
using Op = c10d::ReduceOp::RedOpType;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

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
                {"4 x float32 [4]", "rank 3 called scatter(root 0)", "float32 [5]"}},
        Mistake{"SplitsOfAnAllToAll",
                [](int rank, auto& backend) {
                  all_to_all(backend, {1, 2, 3, 4}, std::vector<int64_t>(4, rank + 1));
                  const std::vector<int64_t> even(4, 1), uneven{2, 0, 1, 1};
                  all_to_all(backend, rank == 2 ? uneven : even, even);
                },
                {"rank 2", "all_to_all_single", "collective 17", "expects float32 [1]"}},
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

}  // namespace hierarchical_mistakes_test
}  // namespace lockstep::hierarchical
