#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"

#include <ATen/Parallel.h>
#include <gmock/gmock.h>

#include "lockstep/base/error.h"
#include "lockstep/parallel/whole_model.h"
#include "tests/support/message_of.h"
#include "tests/support/over_backends.h"
#include "tests/support/plain_optimizers.h"
#include "tests/support/published.h"
#include "tests/support/zero_training.h"

namespace lockstep {
namespace zero_strategy_test {

using ::testing::HasSubstr;
using zero_test::expect_same;
using zero_test::Job;
using zero_test::MakeStrategy;
using zero_test::Net;
using zero_test::setup_of;
using zero_test::train;
using zero_test::train_steps;
using zero_test::Trained;

std::unique_ptr<Strategy> make_ddp(const StrategySetup& setup) {
  return make_ddp_strategy(setup);
}

const std::vector<std::pair<std::string, MakeStrategy>> kStages{{"zero1", make_zero1_strategy},
                                                                {"zero2", make_zero2_strategy}};

/// LibTorch's Adagrad keeps zeros for frozen parameters, too.
StateDict of_trained(StateDict state) {
  std::erase_if(state, [](const auto& entry) {
    return entry.first.ends_with(".2") || entry.first.ends_with(".3");
  });
  return state;
}

void expect_close(const StateDict& a, const StateDict& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_TRUE(at::allclose(a[i].second, b[i].second, 1e-3, 1e-4)) << what << a[i].first;
}

/// Ranks of 1 to 4 train the same with ddp and with each stage of ZeRO.
void expect_ddp_bits(const Job& job, const ProcessGroup& group, const std::string& what) {
  const Trained plain = train(make_ddp, group, job);
  for (const auto& [name, make] : kStages) {
    const Trained sharded = train(make, group, job);
    const std::string where = what + ", " + name + ", rank " + std::to_string(group.rank()) +
                              " of " + std::to_string(group.size());
    EXPECT_NE(plain.losses.front(), plain.losses.back());
    if (name == "zero2" && group.backend() != "shm" && group.size() > 2) {
      // The sums of three ranks are added in another order.
      expect_close(plain.model, sharded.model, where);
      continue;
    }
    EXPECT_EQ(plain.losses, sharded.losses) << where;
    expect_same(plain.model, sharded.model, where);
    expect_same(of_trained(plain.optimizer), sharded.optimizer, where);
  }
}

/// Large enough that what is spent on whole multiples does not count.
struct Large : torch::nn::Module {
  Large() { register_module("a", a), register_module("b", b); }
  at::Tensor forward(const at::Tensor& x) { return b(at::relu(a(x))); }
  torch::nn::Linear a{300, 200}, b{200, 101};
};

class ZeroStrategy : public test::OverBackends {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};
INSTANTIATE_TEST_SUITE_P(All, ZeroStrategy, test::over_backends(), test::backend_name);

TEST_P(ZeroStrategy, ACheckpointedLayerThatRunsTwiceIsRefused) {
  run_group(2, [](const ProcessGroup& group) {
    for (const auto& [name, make] : kStages) {
      auto net = std::make_shared<ddp_test::Repeated>();
      ddp_test::fill(*net, 1);
      const auto strategy = make({.module = net,
                                  .make_optimizer = zero_test::factory_of({.optimizer = "sgd"}),
                                  .group = group});
      const auto step = [&] {
        strategy->run_batch({.loss = [&] {
          return net->forward(ddp_test::values({4, 6}, group.rank()), 2).sum();
        }});
      };
      EXPECT_THAT(
          test::message_of(step),
          HasSubstr(name + ", rank " + std::to_string(group.rank()) + ": backward gave block."));
    }
  });
}

TEST_P(ZeroStrategy, ValuesThatArePutInAfterwardsAreTrained) {
  run_group(2, [](const ProcessGroup& group) {
    const auto train_on = [&](const MakeStrategy& make) {
      auto net = std::make_shared<ddp_test::Net>();
      ddp_test::fill(*net, 1);
      const auto strategy =
          make({.module = net, .make_optimizer = zero_test::factory_of({}), .group = group});
      for (int step = 0; step < 6; ++step) {
        if (step % 3 == 0) {
          ddp_test::Net other;
          ddp_test::fill(other, 3 + step);
          for (size_t i = 0; i < other.parameters().size(); ++i)
            net->parameters()[i].set_data(other.parameters()[i].detach());
        }
        strategy->run_batch({.loss = [&] {
          return net->forward(ddp_test::values({4, 6}, 10 * group.rank() + step)).square().sum();
        }});
        strategy->step();
        strategy->zero_grad();
      }
      return net;
    };
    const auto expected = train_on(make_ddp);
    for (const auto& [name, make] : kStages) {
      const auto net = train_on(make);
      for (size_t i = 0; i < net->parameters().size(); ++i)
        EXPECT_TRUE(at::equal(net->parameters()[i], expected->parameters()[i])) << name << i;
    }
  });
}

TEST_P(ZeroStrategy, OtherDtypesAndFrozenLayersAreNamed) {
  run_group(2, [](const ProcessGroup& group) {
    for (const auto& [name, make] : kStages) {
      auto net = std::make_shared<ddp_test::Net>();
      const auto strategy =
          make({.module = net, .make_optimizer = zero_test::factory_of({}), .group = group});
      const auto run = [&] {
        strategy->run_batch({.loss = [&] {
          return net->forward(ddp_test::values({4, 6}, 0).to(net->first->weight.dtype())).sum();
        }});
      };
      run();
      net->first->bias.requires_grad_(false);
      const auto message = test::message_of(run);
      // Stage 1 gives the parameter no gradient from now on, as ddp does.
      EXPECT_THAT(message, HasSubstr(name == "zero2" ? "parameter first.bias" : "no error"));
      net->first->bias.requires_grad_(true);
      net->to(at::kDouble);
      EXPECT_THAT(test::message_of(run), HasSubstr("parameter first.weight"));
    }
  });
}

TEST_P(ZeroStrategy, HasTheBitsOfDdp) {
  for (const int ranks : {1, 2, 3, 4}) {
    if (ranks == 1 && GetParam() == "hierarchical") continue;
    run_group(ranks, [](const ProcessGroup& group) { expect_ddp_bits({}, group, "adam"); });
  }
}

TEST_P(ZeroStrategy, HasTheBitsOfDdpWithEveryOptimizer) {
  for (const int ranks : {2, 3}) {
    run_group(ranks, [](const ProcessGroup& group) {
      for (const std::string& name : test::plain_optimizers()) {
        Job job{.optimizer = name, .options = {.lr = 0.01, .weight_decay = 0.1}};
        if (name == "sgd" || name == "rmsprop") job.options.momentum = 0.9;
        expect_ddp_bits(job, group, name);
      }
    });
  }
}

TEST_P(ZeroStrategy, Stage1HasTheBitsOfDdpWithAnOptimizerOfWholeParameters) {
  for (const int ranks : {2, 3}) {
    run_group(ranks, [](const ProcessGroup& group) {
      const Job job{.optimizer = "normed", .accumulate = 2};
      const Trained plain = train(make_ddp, group, job);
      const Trained sharded = train(make_zero1_strategy, group, job);
      EXPECT_EQ(plain.losses, sharded.losses);
      expect_same(plain.model, sharded.model, "zero1");
      EXPECT_THROW(train(make_zero2_strategy, group, job), UsageError);
    });
  }
}

TEST_P(ZeroStrategy, HasTheBitsOfDdpWhenGradientsAddUp) {
  run_group(2, [](const ProcessGroup& group) {
    expect_ddp_bits({.accumulate = 3}, group, "accumulation");
  });
}

TEST_P(ZeroStrategy, ClipsByTheNormOfAllGradients) {
  run_group(2, [](const ProcessGroup& group) {
    const Job job{.optimizer = "sgd", .options = {.lr = 0.5}, .max_norm = 0.01};
    const Trained plain = train(make_ddp, group, job);
    const Trained stage1 = train(make_zero1_strategy, group, job);
    EXPECT_EQ(plain.norms, stage1.norms);
    expect_same(plain.model, stage1.model, "zero1");
    // The norm is one over shards, so that it is rounded in another way.
    const Trained stage2 = train(make_zero2_strategy, group, job);
    for (size_t i = 0; i < plain.norms.size(); ++i) {
      EXPECT_GT(plain.norms[i], 0.01);
      EXPECT_NEAR(plain.norms[i], stage2.norms[i], 1e-5 * plain.norms[i]);
    }
    expect_close(plain.model, stage2.model, "zero2");
  });
}

TEST_P(ZeroStrategy, KeepsAPartOfTheState) {
  for (const int ranks : {2, 4}) {
    run_group(ranks, [](const ProcessGroup& group) {
      const double n = group.size();
      for (const auto& [name, make] : kStages) {
        auto net = std::make_shared<Large>();
        StrategySetup setup;
        setup.module = net;
        setup.make_optimizer = zero_test::factory_of({});
        setup.group = group;
        const auto strategy = make(setup);
        BatchWork work;
        work.loss = [&] { return net->forward(ddp_test::values({2, 300}, group.rank())).sum(); };
        strategy->run_batch(work);
        strategy->step();
        double elements = 0;
        for (const at::Tensor& parameter : net->parameters())
          elements += static_cast<double>(parameter.numel());
        const double wanted = elements * (name == "zero1" ? 8 + 8 / n : 4 + 12 / n);
        EXPECT_LE(static_cast<double>(strategy->state_bytes().total()), 1.05 * wanted) << name;
        EXPECT_GE(static_cast<double>(strategy->state_bytes().total()), 0.99 * wanted) << name;
        for (const at::Tensor& parameter : net->parameters())
          EXPECT_EQ(parameter.grad().defined(), name == "zero1");
      }
    });
  }
}

TEST_P(ZeroStrategy, NamesAParameterWithoutAGradient) {
  run_group(2, [](const ProcessGroup& group) {
    auto net = std::make_shared<ddp_test::Heads>();
    StrategySetup setup;
    setup.module = net;
    setup.make_optimizer = zero_test::factory_of({});
    setup.group = group;
    const auto strategy = make_zero2_strategy(setup);
    BatchWork work;
    work.loss = [&] { return net->forward(ddp_test::values({4, 6}, 1)).first.sum(); };
    strategy->run_batch(work);
    try {
      strategy->run_batch(work);
      ADD_FAILURE() << "accepted";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("right.weight, right.bias"));
      EXPECT_THAT(error.what(), HasSubstr("freeze"));
    }
  });
}

TEST_P(ZeroStrategy, ReducesInAnotherDtype) {
  run_group(2, [](const ProcessGroup& group) {
    const Trained plain = train(make_ddp, group, {.optimizer = "sgd"});
    for (const auto& [name, make] : kStages) {
      auto net = std::make_shared<Net>();
      auto setup = setup_of(net, group, {.optimizer = "sgd"});
      setup.options.zero = ZeroOptions{.reduce_dtype = at::kBFloat16};
      const auto strategy = make(setup);
      Trained trained;
      train_steps(*strategy, *net, {.optimizer = "sgd"}, 0, 3, trained);
      // bfloat16 has 8 bits: other than in float32, but near.
      EXPECT_NE(plain.losses, trained.losses) << name;
      EXPECT_NEAR(plain.losses.back(), trained.losses.back(), 0.02 * plain.losses.back()) << name;
    }
  });
}

TEST_P(ZeroStrategy, ResumesFromDdpAndBack) {
  // The sums of three ranks over Gloo depend on the buckets, which the second step makes anew.
  run_group(GetParam() == "shm" ? 3 : 2, [](const ProcessGroup& group) {
    const Job job;
    for (const auto& [name, make] : kStages) {
      for (const bool to_zero : {true, false}) {
        auto net = std::make_shared<Net>();
        Trained wanted;
        const auto first = (to_zero ? make_ddp : make)(setup_of(net, group, job));
        train_steps(*first, *net, job, 0, 2, wanted);
        // What a checkpoint holds is on rank 0, and is loaded by all.
        static test::Published<StateDict> model, optimizer;
        auto saved_model = zero_test::copied(first->model_state());
        auto saved_optimizer = zero_test::copied(first->optimizer_state());
        if (group.rank() == 0) {
          model.set(saved_model);
          optimizer.set(saved_optimizer);
        }
        group.barrier();
        train_steps(*first, *net, job, 2, 2, wanted);

        auto other_net = std::make_shared<Net>();
        Trained resumed;
        const auto second = (to_zero ? make : make_ddp)(setup_of(other_net, group, job));
        second->load_model_state(model.get());
        second->load_optimizer_state(optimizer.get());
        train_steps(*second, *other_net, job, 2, 2, resumed);
        expect_same(zero_test::tensors_of(*net), zero_test::tensors_of(*other_net), name);
        group.barrier();
      }
    }
  });
}

TEST_P(ZeroStrategy, NamesItselfWhereModulesDiffer) {
  run_group(2, [](const ProcessGroup& group) {
    const std::vector<std::pair<std::string, MakeStrategy>> makes{
        {"ddp", make_ddp}, {"zero1", make_zero1_strategy}, {"zero2", make_zero2_strategy}};
    for (const auto& [name, make] : makes) {
      auto net = std::make_shared<Net>();
      if (group.rank() == 1) net->register_buffer("extra", at::zeros({2}));
      try {
        (void)make(setup_of(net, group, {}));
        ADD_FAILURE() << name << " accepted it";
      } catch (const MismatchError& error) {
        EXPECT_THAT(error.what(), HasSubstr("strategy " + name + ": the ranks have different"));
      }
    }
  });
}

/// Each of them is reduced by itself.
TEST_P(ZeroStrategy, GradientsOfSeveralWholeBatchesAddUp) {
  run_group(2, [](const ProcessGroup& group) {
    std::vector<double> norms;
    for (const MakeStrategy make : {MakeStrategy(make_ddp), MakeStrategy(make_zero2_strategy)}) {
      auto net = std::make_shared<Net>();
      const auto strategy = make(setup_of(net, group, {}));
      for (const int batch : {1, 2}) {
        strategy->run_batch({.loss = [&] {
          return net->forward(ddp_test::values({4, 75}, batch + 10 * group.rank())).square().sum();
        }});
      }
      norms.push_back(strategy->clip_grad_norm(1));
    }
    EXPECT_NEAR(norms[1], norms[0], 1e-4 * norms[0]);
  });
}

TEST_P(ZeroStrategy, RefusesAStepWhileGradientsAddUp) {
  run_group(2, [](const ProcessGroup& group) {
    for (const MakeStrategy make : {MakeStrategy(make_ddp), MakeStrategy(make_zero1_strategy),
                                    MakeStrategy(make_zero2_strategy)}) {
      auto net = std::make_shared<Net>();
      const auto strategy = make(setup_of(net, group, {}));
      BatchWork work;
      work.loss = [&] { return net->forward(ddp_test::values({4, 75}, 1)).sum(); };
      work.last_of_step = false;
      strategy->run_batch(work);
      try {
        strategy->step();
        ADD_FAILURE() << "accepted";
      } catch (const UsageError& error) {
        EXPECT_THAT(error.what(), HasSubstr("only add up"));
        EXPECT_THAT(error.what(), HasSubstr("last_of_step"));
      }
      work.last_of_step = true;
      strategy->run_batch(work);
      strategy->step();
    }
  });
}

}  // namespace zero_strategy_test
}  // namespace lockstep
