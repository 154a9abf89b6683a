#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"

#include <ATen/Parallel.h>
#include <gmock/gmock.h>

#include <latch>

#include "lockstep/base/error.h"
#include "lockstep/parallel/ddp.h"
#include "tests/support/message_of.h"
#include "tests/support/over_backends.h"
#include "tests/support/zero_training.h"

namespace lockstep {
namespace zero_redundancy_optimizer_test {

using ::testing::HasSubstr;
using zero_test::expect_same;
using zero_test::factory_of;
using zero_test::Job;
using zero_test::Net;
using zero_test::Normed;

/// A user's own loop. Rank 0's state at the end.
template <class Step>
StateDict train(const ProcessGroup& group, const std::shared_ptr<Net>& net, const Step& step) {
  DistributedDataParallel ddp(net, group);
  for (int i = 0; i < 3; ++i) {
    zero_grad(net->parameters());
    ddp(ddp_test::values({4, 75}, 100 * group.rank() + i)).square().mean().backward();
    step();
  }
  return zero_test::tensors_of(*net);
}

class ZeroOptimizer : public test::OverBackends {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};
INSTANTIATE_TEST_SUITE_P(All, ZeroOptimizer, test::over_backends(), test::backend_name);

TEST_P(ZeroOptimizer, UpdatesAsTheWholeOptimizerDoes) {
  for (const int ranks : {2, 4}) {
    run_group(ranks, [](const ProcessGroup& group) {
      auto plain = std::make_shared<Net>(), sharded = std::make_shared<Net>();
      const auto whole = factory_of({})(plain->parameters());
      const auto wanted = train(group, plain, [&] { whole->step(); });
      ZeroRedundancyOptimizer zero(sharded->parameters(), factory_of({}), group);
      expect_same(wanted, train(group, sharded, [&] { zero.step(); }), "weights");
      zero.consolidate_state_dict(1);
      if (group.rank() == 1) expect_same(whole->state(), zero.state(), "state");
    });
  }
}

TEST_P(ZeroOptimizer, KeepsTheStateOfALayerThatIsFrozenOnResume) {
  run_group(2, [](const ProcessGroup& group) {
    for (const std::string optimizer : {"adam", "adagrad", "sgd"}) {
      const auto make =
          factory_of({.optimizer = optimizer, .options = {.lr = 0.05, .momentum = 0.9}});
      auto plain = std::make_shared<Net>(), resumed = std::make_shared<Net>();
      const auto whole = make(plain->parameters());
      train(group, plain, [&] { whole->step(); });
      for (at::Tensor& parameter : resumed->last->parameters()) parameter.requires_grad_(false);
      ZeroRedundancyOptimizer zero(resumed->parameters(), make, group);
      zero.load_state(whole->state());
      train(group, resumed, [&] { zero.step(); });
      zero.consolidate_state_dict(1);
      if (group.rank() == 1) zero_test::expect_same_entries(whole->state(), zero.state(), {6, 7});
    }
  });
}

/// The parameters would stay alike: each part is updated by one rank.
TEST_P(ZeroOptimizer, ARateOfOneRanksOwnIsNoticed) {
  run_group(2, [](const ProcessGroup& group) {
    auto net = std::make_shared<Net>();
    ZeroRedundancyOptimizer zero(net->parameters(), factory_of({}), group);
    if (group.rank() == 1) zero.set_lr(0.5);
    try {
      train(group, net, [&] { zero.step(); });
      ADD_FAILURE() << "no error";
    } catch (const MismatchError& error) {
      EXPECT_EQ(error.failure().detail, "learning rate");
    }
  });
}

TEST_P(ZeroOptimizer, TiedParametersCountOnce) {
  run_group(2, [](const ProcessGroup& group) {
    const auto train_tied = [&](auto make_optimizer_of) {
      auto net = std::make_shared<ddp_test::Tied>();
      ddp_test::fill(*net, 1);
      DistributedDataParallel ddp(net, group);
      const auto optimizer = make_optimizer_of(ddp);
      for (int step = 0; step < 3; ++step) {
        zero_grad(net->parameters());
        ddp(ddp_test::values({3, 4}, 10 * group.rank() + step)).square().mean().backward();
        optimizer->step();
      }
      return net->weight.detach().clone();
    };
    const at::Tensor whole =
        train_tied([](auto& ddp) { return factory_of({})({ddp.module().weight}); });
    const at::Tensor sharded = train_tied(
        [](auto& ddp) { return std::make_unique<ZeroRedundancyOptimizer>(ddp, factory_of({})); });
    EXPECT_TRUE(at::equal(whole, sharded));
  });
}

TEST_P(ZeroOptimizer, DoesNotCutForAnOptimizerOfWholeParameters) {
  run_group(3, [](const ProcessGroup& group) {
    const auto make = factory_of({.optimizer = "normed"});
    auto plain = std::make_shared<Net>(), sharded = std::make_shared<Net>();
    Normed whole(plain->parameters());
    const auto wanted = train(group, plain, [&] { whole.step(); });
    ZeroRedundancyOptimizer zero(sharded->parameters(), make, group);
    expect_same(wanted, train(group, sharded, [&] { zero.step(); }), "weights");
  });
}

/// What MasterWeights relies on: parts have the count of changes of their parameter.
TEST_P(ZeroOptimizer, PartsSeeThatAParameterChanged) {
  run_group(2, [](const ProcessGroup& group) {
    at::Tensor parameter = at::zeros({256}).requires_grad_();
    std::vector<at::Tensor> parts;
    const auto make = [&](std::vector<at::Tensor> given) {
      parts = given;
      return factory_of({})(std::move(given));
    };
    ZeroRedundancyOptimizer zero({parameter}, make, group);
    const auto before = parts[0]._version();
    const c10::AutoGradMode no_grad(false);
    parameter.fill_(3);
    EXPECT_GT(parts[0]._version(), before);
    EXPECT_EQ(parts[0].sum().item<float>(), 3 * 128);
    // Also of a parameter that another rank updates: a graph may still need the old values.
    at::Tensor small = at::zeros({10}).requires_grad_();
    ZeroRedundancyOptimizer of_one_rank({small}, factory_of({}), group);
    const auto of_small = small._version();
    small.mutable_grad() = at::ones({10});
    of_one_rank.step();
    EXPECT_GT(small._version(), of_small);
  });
}

TEST_P(ZeroOptimizer, GoesOnWithValuesThatWerePutIn) {
  for (const bool on_all : {true, false}) {
    run_group(2, [&](ProcessGroup group) {
      auto net = std::make_shared<ddp_test::Net>(), other = std::make_shared<ddp_test::Net>();
      ddp_test::fill(*other, 5);
      DistributedDataParallel ddp(net, group);
      ZeroRedundancyOptimizer zero(ddp, factory_of({.optimizer = "sgd", .options = {.lr = 0.5}}));
      if (on_all || group.rank() == 0) {
        for (size_t i = 0; i < 4; ++i)
          net->parameters()[i].set_data(other->parameters()[i].detach().clone());
      }
      ddp.forward(ddp_test::values({4, 6}, group.rank())).sum().backward();
      if (!on_all) {
        EXPECT_THROW(zero.step(), CommError);
        return;
      }
      zero.step();
      for (size_t i = 0; i < 4; ++i) {
        const at::Tensor parameter = net->parameters()[i];
        EXPECT_TRUE(at::allclose(parameter, other->parameters()[i] - 0.5 * parameter.grad())) << i;
      }
      net->to(at::kDouble);
      EXPECT_THAT(test::message_of([&] { zero.step(); }), HasSubstr("parameter 0 is"));
    });
  }
}

TEST_P(ZeroOptimizer, SeveralDtypes) {
  run_group(2, [](const ProcessGroup& group) {
    const auto make = [] {
      return std::vector<at::Tensor>{ddp_test::values({300}, 1).requires_grad_(),
                                     ddp_test::values({7, 50}, 2).to(at::kDouble).requires_grad_(),
                                     ddp_test::values({9}, 3).requires_grad_()};
    };
    const auto plain = make(), sharded = make();
    const auto whole = factory_of({})(plain);
    ZeroRedundancyOptimizer zero(sharded, factory_of({}), group);
    for (int step = 0; step < 2; ++step) {
      for (size_t i = 0; i < plain.size(); ++i) {
        plain[i].mutable_grad() = plain[i].detach().cos() - step;
        sharded[i].mutable_grad() = plain[i].grad().clone();
      }
      whole->step();
      zero.step();
    }
    for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::equal(plain[i], sharded[i])) << i;
    zero.consolidate_state_dict(0);
    if (group.rank() == 0) expect_same(whole->state(), zero.state(), "state");
  });
}

TEST_P(ZeroOptimizer, FewerElementsThanRanks) {
  run_group(4, [](const ProcessGroup& group) {
    at::Tensor parameter = at::full({3}, 1.0).requires_grad_();
    at::Tensor copy = parameter.detach().clone().requires_grad_();
    ZeroRedundancyOptimizer zero({parameter}, factory_of({}), group);
    const auto whole = factory_of({})({copy});
    for (int step = 0; step < 2; ++step) {
      parameter.mutable_grad() = at::arange(3, at::kFloat) - step;
      copy.mutable_grad() = parameter.grad().clone();
      zero.step();
      whole->step();
    }
    EXPECT_TRUE(at::equal(parameter, copy));
    zero.consolidate_state_dict(3);
    if (group.rank() == 3) expect_same(whole->state(), zero.state(), "state");
  });
}

TEST_P(ZeroOptimizer, TakesFurtherGroups) {
  run_group(2, [](const ProcessGroup& group) {
    const auto fast = factory_of({.options = {.lr = 0.1}});
    auto plain = std::make_shared<Net>(), sharded = std::make_shared<Net>();
    const auto split = [](Net& net) {
      std::vector<at::Tensor> head = net.last->parameters(), rest;
      for (const auto& item : net.named_parameters()) {
        if (!item.key().starts_with("last")) rest.push_back(item.value());
      }
      return std::pair(rest, head);
    };
    const auto [rest, head] = split(*plain);
    const auto a = factory_of({})(rest), b = fast(head);
    const auto wanted = train(group, plain, [&] {
      a->step();
      b->step();
    });
    const auto [sharded_rest, sharded_head] = split(*sharded);
    ZeroRedundancyOptimizer zero(sharded_rest, factory_of({}), group);
    zero.add_param_group(sharded_head, fast);
    expect_same(wanted, train(group, sharded, [&] { zero.step(); }), "weights");
    EXPECT_THROW(zero.add_param_group({sharded_head[0]}, fast), UsageError);
    zero.consolidate_state_dict(0);
    StateDict all = a->state();
    for (const auto& [key, tensor] : b->state()) {
      const size_t dot = key.rfind('.');
      all.emplace_back(
          key.substr(0, dot + 1) + std::to_string(rest.size() + std::stoul(key.substr(dot + 1))),
          tensor);
    }
    if (group.rank() == 0) expect_same(all, zero.state(), "state");
    zero.load_state(all);
  });
}

TEST_P(ZeroOptimizer, RefusesAStateThatDoesNotFit) {
  run_group(3, [](const ProcessGroup& group) {
    auto net = std::make_shared<Net>();
    ZeroRedundancyOptimizer zero(net->parameters(), factory_of({}), group);
    train(group, net, [&] { zero.step(); });
    for (int rank = 0; rank < 3; ++rank) zero.consolidate_state_dict(rank);
    const StateDict good = zero_test::copied(zero.state());
    StateDict misshapen = good;
    for (auto& [name, tensor] : misshapen) {
      if (name == "exp_avg_sq.0") tensor = at::zeros({2});
    }
    EXPECT_THROW(zero.load_state(misshapen), CheckpointError);
    StateDict foreign = good;
    foreign.emplace_back("exp_avg.99", at::zeros({2}));
    EXPECT_THROW(zero.load_state(foreign), CheckpointError);
    for (int rank = 0; rank < 3; ++rank) zero.consolidate_state_dict(rank);
    expect_same(good, zero.state(), "after refusals");
  });
}

TEST_P(ZeroOptimizer, ConsolidationNamesTheRankThatIsMissing) {
  test::RankOptions options;
  options.timeout = std::chrono::milliseconds(700);
  std::latch done(1);
  struct Release {
    std::latch& latch;
    ~Release() { latch.count_down(); }
  };
  run_group(
      2,
      [&](const ProcessGroup& group) {
        at::Tensor parameter = at::full({200}, 1.0).requires_grad_();
        ZeroRedundancyOptimizer zero({parameter}, factory_of({}), group);
        if (group.rank() == 1) {
          EXPECT_THROW(zero.state(), UsageError);
          return done.wait();
        }
        const Release release{done};
        try {
          zero.consolidate_state_dict(0);
          ADD_FAILURE() << "rank 1 did not come";
        } catch (const TimeoutError& error) {
          EXPECT_THAT(error.what(), HasSubstr("rank 1"));
        }
      },
      options);
}

TEST_P(ZeroOptimizer, OverlapsWithBackward) {
  run_group(2, [](const ProcessGroup& group) {
    const auto run = [&](const DdpOptions& options, const auto& step) {
      return [&group, options, step](const std::shared_ptr<Net>& net) {
        DistributedDataParallel ddp(net, group, options);
        for (int i = 0; i < 4; ++i) {
          zero_grad(net->parameters());
          ddp(ddp_test::values({4, 75}, 100 * group.rank() + i)).square().mean().backward();
          step();
        }
        return zero_test::tensors_of(*net);
      };
    };
    DdpOptions options;
    options.bucket_cap_mb = options.first_bucket_mb = 0.001;  // From step 2 on several buckets.
    auto plain = std::make_shared<Net>(), sharded = std::make_shared<Net>();
    const auto whole = factory_of({})(plain->parameters());
    const auto wanted = run(options, [&] { whole->step(); })(plain);
    ZeroRedundancyOptimizer zero(sharded->parameters(), factory_of({}), group);
    options.async_custom_hook = zero.hook_with_zero_step();
    expect_same(wanted, run(options, [&] { zero.step(); })(sharded), "weights");
    zero.consolidate_state_dict(0);
    if (group.rank() == 0) expect_same(whole->state(), zero.state(), "state");
  });
}

TEST_P(ZeroOptimizer, RefusesAStepWithinNoSync) {
  run_group(2, [](const ProcessGroup& group) {
    auto net = std::make_shared<Net>();
    DistributedDataParallel ddp(net, group);
    ZeroRedundancyOptimizer zero(ddp, factory_of({}));
    const auto backward = [&] { ddp(ddp_test::values({4, 75}, 1)).sum().backward(); };
    {
      const auto guard = ddp.no_sync();
      backward();
    }
    try {
      zero.step();
      ADD_FAILURE() << "accepted";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("no_sync"));
    }
    backward();
    zero.step();
  });
}

TEST_P(ZeroOptimizer, WrongUse) {
  run_group(2, [](const ProcessGroup& group) {
    at::Tensor parameter = at::zeros({8}).requires_grad_(), frozen = at::zeros({8});
    EXPECT_THROW(ZeroRedundancyOptimizer({}, factory_of({}), group), UsageError);
    EXPECT_THROW(ZeroRedundancyOptimizer({parameter}, factory_of({}), {}), UsageError);
    EXPECT_THROW(ZeroRedundancyOptimizer({at::zeros({group.rank() + 1})}, factory_of({}), group),
                 MismatchError);
    ZeroRedundancyOptimizer zero({parameter, frozen}, factory_of({}), group);
    parameter.mutable_grad() = at::ones({8}).to_sparse();
    EXPECT_THROW(zero.step(), UsageError);
    parameter.mutable_grad().reset();
    frozen.requires_grad_();
    frozen.mutable_grad() = at::ones({8});
    EXPECT_THROW(zero.step(), UsageError);
  });
}

}  // namespace zero_redundancy_optimizer_test
}  // namespace lockstep
