#include "lockstep/parallel/shard_reducer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/over_backends.h"

namespace lockstep::detail {
namespace shard_reducer_test {

class ShardReducer : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, ShardReducer, test::over_backends(), test::backend_name);

/// Small whole numbers, whose means over four ranks are exact in any order.
at::Tensor gradient_of(size_t parameter, int rank, int round, int64_t size) {
  const auto first = static_cast<int64_t>(parameter) + 3 * rank + round;
  return at::arange(first, first + size).remainder(17).to(at::kFloat);
}

/// Units of two parameters each, cut over `group`, and this rank's parts of them.
struct Sharded {
  explicit Sharded(const ProcessGroup& group) : rank(group.rank()) {
    for (const int64_t size : {300, 7, 64, 1000, 5, 129})
      parameters.push_back(at::zeros({size}).set_requires_grad(true));
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (i % 2 == 0) units.emplace_back();
      units.back().add("", parameters[i], i);
      trained.push_back({std::to_string(i), parameters[i]});
    }
    for (FlatUnit& unit : units) unit.cut_evenly(group.size());
    parts.resize(parameters.size());
    for (const FlatUnit& unit : units) {
      for (const FlatParameter& member : unit.parameters) {
        const Part part = unit.part(rank, member);
        parts[member.index] = member.tensor.detach().narrow(0, part.begin, part.numel()).clone();
      }
    }
  }

  /// `first`: of the units, the one that is complete first.
  void reduce(detail::ShardReducer& reducer, size_t first,
              const std::function<at::Tensor(size_t)>& gradient) const {
    reducer.begin();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const size_t index = (i + 2 * first) % parameters.size();
      parameters[index].mutable_grad() = gradient(index);
      if (reducer.arrived(index)) reducer.reduce_in_turn();
    }
    reducer.finish();
  }

  /// Whether the parts' gradients are their parts of these.
  void expect(const std::vector<at::Tensor>& means) const {
    for (const FlatUnit& unit : units) {
      for (const FlatParameter& member : unit.parameters) {
        const Part part = unit.part(rank, member);
        if (part.numel() == 0) continue;
        EXPECT_TRUE(at::equal(parts[member.index].grad(),
                              means[member.index].narrow(0, part.begin, part.numel())))
            << member.name << " of rank " << rank << " in its replica";
      }
    }
  }

  int rank;
  std::vector<at::Tensor> parameters;
  std::vector<ReducedParameter> trained;
  std::vector<FlatUnit> units;
  std::vector<at::Tensor> parts;
};

TEST_P(ShardReducer, MeansAreOverAllReplicas) {
  run_group(4, [](const ProcessGroup& all) {
    const ProcessGroup shard = all.split(all.rank() / 2), replicate = all.split(all.rank() % 2);
    // In whole units, in chunks, and in another dtype.
    std::vector<ShardReducerOptions> cases(3, {.what = "test", .caller = "test"});
    cases[1].chunk_bytes = 1024;
    cases[2].dtype = at::kDouble;
    for (ShardReducerOptions& options : cases) {
      options.replicate = replicate;
      const Sharded sharded(shard);
      detail::ShardReducer reducer(sharded.units, sharded.trained, sharded.parts, shard, options);
      std::vector<at::Tensor> sums;
      for (const at::Tensor& parameter : sharded.parameters)
        sums.push_back(at::zeros_like(parameter.detach()));
      // The second round adds up to the first. Units are complete in another order on each rank.
      for (int round = 0; round < 3; ++round) {
        if (round == 2) reducer.drop();
        for (size_t i = 0; i < sums.size(); ++i) {
          at::Tensor mean = gradient_of(i, all.rank(), round, sums[i].numel()).div_(all.size());
          all.all_reduce(mean);
          round == 2 ? sums[i].copy_(mean) : sums[i].add_(mean);
        }
        sharded.reduce(reducer, static_cast<size_t>(all.rank()) % 3, [&](size_t i) {
          return gradient_of(i, all.rank(), round, sums[i].numel());
        });
        sharded.expect(sums);
      }
    }
  });
}

}  // namespace shard_reducer_test
}  // namespace lockstep::detail
