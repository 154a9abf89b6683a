// The strategy against ddp, the seam's other user, to the bit.
#include "lockstep/parallel/fsdp/fsdp.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <future>
#include <nlohmann/json.hpp>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/models/models.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/parallel/whole_model.h"
#include "tests/support/ddp_test_modules.h"
#include "tests/support/over_backends.h"

namespace lockstep {
namespace fsdp_strategy_test {

using ddp_test::fill;
using ddp_test::values;
using ::testing::HasSubstr;

struct TaskOptions {
  std::string optimizer = "adam";
  FsdpOptions fsdp = {};
  StrategyOptions common = {};
};

/// Every layer is a unit, and the last of them is smaller than a shard's block.
FsdpOptions layers_as_units(bool share_memory) {
  FsdpOptions options;
  options.units = {"layers.*"};
  options.share_memory = share_memory;
  return options;
}

struct Task {
  std::shared_ptr<Model> model;
  std::unique_ptr<Strategy> strategy;

  Task(const ProcessGroup& group, const std::string& kind, const TaskOptions& options = {})
      : model(make_model("mlp")) {
    fill(*model, 1 + group.rank());  // Rank 0's values count.
    StrategySetup setup;
    setup.module = model;
    setup.group = group;
    setup.options = options.common;
    setup.options.fsdp = options.fsdp;
    setup.make_optimizer = [&](std::vector<at::Tensor> parameters) {
      OptimizerOptions hyper;
      hyper.lr = 0.01;
      hyper.momentum = options.optimizer == "sgd" ? 0.9 : 0;
      return make_optimizer(options.optimizer, std::move(parameters), hyper);
    };
    strategy = kind == "ddp" ? make_ddp_strategy(setup) : make_fsdp_strategy(setup);
  }

  at::Tensor loss_of(int step) {
    const int rank = strategy->group().rank();
    const auto x = values({8, 784}, 100 * rank + step);
    const auto y = at::arange(8).add(rank + step).remainder(10);
    return at::cross_entropy_loss(model->forward(x), y);
  }
  at::Tensor batch(int step, bool last = true) {
    at::Tensor loss;
    strategy->run_batch({.loss = [&] { return loss = loss_of(step); }, .last_of_step = last});
    return loss.detach();
  }
  void train(int steps, double max_norm = 0) {
    for (int step = 0; step < steps; ++step) {
      batch(step);
      if (max_norm > 0) strategy->clip_grad_norm(max_norm);
      strategy->step();
      strategy->zero_grad();
    }
  }
};

void expect_same(const StateDict& a, const StateDict& b, double tolerance = 0) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].first, b[i].first);
    EXPECT_TRUE(tolerance == 0 ? at::equal(a[i].second, b[i].second)
                               : at::allclose(a[i].second, b[i].second, tolerance, tolerance))
        << a[i].first;
  }
}

StateDict copy(const StateDict& state) {
  StateDict copied;
  for (const auto& [name, tensor] : state) copied.emplace_back(name, tensor.clone());
  return copied;
}

/// A whole state on every rank, as a checkpoint's reader has it.
StateDict on_all_ranks(const ProcessGroup& group, const StateDict& state) {
  nlohmann::json names = nlohmann::json::array();
  for (const auto& [name, tensor] : state)
    names.push_back({name, tensor.sizes().vec(), static_cast<int>(tensor.scalar_type())});
  StateDict all;
  names = group.broadcast_object(names, 0);
  for (size_t i = 0; i < names.size(); ++i) {
    at::Tensor tensor = at::empty(names[i][1].get<std::vector<int64_t>>(),
                                  static_cast<at::ScalarType>(names[i][2].get<int>()));
    if (group.rank() == 0) tensor.copy_(state[i].second);
    group.broadcast(tensor, 0);
    all.emplace_back(names[i][0].get<std::string>(), tensor);
  }
  return all;
}

class FsdpStrategyTest : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, FsdpStrategyTest, test::over_backends(), test::backend_name);

TEST_P(FsdpStrategyTest, TrainsToTheBitsOfDdp) {
  for (const std::string optimizer : {"adam", "adamw", "sgd"}) {
    for (const bool share : {true, false}) {
      run_group(2, [&](ProcessGroup group) {
        TaskOptions options{.optimizer = optimizer, .fsdp = layers_as_units(share)};
        Task ddp(group, "ddp", options), fsdp(group, "fsdp", options);
        for (int step = 0; step < 4; ++step) {
          EXPECT_TRUE(at::equal(ddp.batch(step), fsdp.batch(step)));
          for (Task* task : {&ddp, &fsdp}) {
            task->strategy->step();
            task->strategy->zero_grad();
          }
        }
        expect_same(fsdp.strategy->model_state(), ddp.strategy->model_state());
        expect_same(fsdp.strategy->optimizer_state(), ddp.strategy->optimizer_state());
        EXPECT_EQ(group.rank() != 0, fsdp.strategy->model_state().empty());
      });
    }
  }
}

TEST_P(FsdpStrategyTest, AStateOfOneStrategyIsTakenByTheOther) {
  run_group(2, [](ProcessGroup group) {
    for (const bool to_fsdp : {true, false}) {
      Task first(group, to_fsdp ? "ddp" : "fsdp"), second(group, to_fsdp ? "fsdp" : "ddp");
      first.train(2);
      second.train(1);
      second.strategy->load_model_state(on_all_ranks(group, first.strategy->model_state()));
      second.strategy->load_optimizer_state(on_all_ranks(group, first.strategy->optimizer_state()));
      first.train(2);
      second.train(2);
      expect_same(second.strategy->model_state(), first.strategy->model_state());
      expect_same(second.strategy->optimizer_state(), first.strategy->optimizer_state());
    }
  });
}

TEST_P(FsdpStrategyTest, ClipsByTheNormOfAllShards) {
  run_group(2, [](ProcessGroup group) {
    Task ddp(group, "ddp"), fsdp(group, "fsdp", {.fsdp = layers_as_units(true)});
    ddp.batch(0);
    fsdp.batch(0);
    const double norm = ddp.strategy->clip_grad_norm(0.01);
    EXPECT_NEAR(fsdp.strategy->clip_grad_norm(0.01), norm, 1e-5 * norm);
    EXPECT_NEAR(fsdp.strategy->clip_grad_norm(1), 0.01, 1e-5);
  });
}

TEST_P(FsdpStrategyTest, ARankThatLeavesItsLoopIsToldOfWithItsSteps) {
  for (const bool share : {true, false}) {
    run_group(2, [&](ProcessGroup group) {
      Task fsdp(group, "fsdp", {.fsdp = layers_as_units(share)});
      fsdp.train(3);
      if (group.rank() == 1) return;
      try {
        fsdp.train(1);
        ADD_FAILURE() << "no error";
      } catch (const PeerLeftError& error) {
        EXPECT_THAT(error.what(), HasSubstr("left its loop after 3 steps"));
      }
    });
  }
}

TEST_P(FsdpStrategyTest, ThreeRanksTrainAsDdpDoes) {
  const bool exact = GetParam() == "shm";
  run_group(3, [&](ProcessGroup group) {
    TaskOptions options{.optimizer = "sgd", .fsdp = layers_as_units(true)};
    Task ddp(group, "ddp", options), fsdp(group, "fsdp", options);
    ddp.train(3);
    fsdp.train(3);
    // Elsewhere than over shared memory three ranks' sum depends on the place in a buffer.
    expect_same(fsdp.strategy->model_state(), ddp.strategy->model_state(), exact ? 0 : 1e-5);
  });
}

void over_shared_memory(int size, const std::function<void(ProcessGroup)>& body) {
  test::run_group(size, body, {.backend = "shm"});
}

TEST(FsdpStrategy, OneToFourRanksHaveTheBitsOfDdp) {
  for (const int size : {1, 2, 3, 4}) {
    for (const bool share : {true, false}) {
      over_shared_memory(size, [&](ProcessGroup group) {
        TaskOptions options{.fsdp = layers_as_units(share)};
        Task ddp(group, "ddp", options), fsdp(group, "fsdp", options);
        ddp.train(3);
        fsdp.train(3);
        expect_same(fsdp.strategy->model_state(), ddp.strategy->model_state());
        expect_same(fsdp.strategy->optimizer_state(), ddp.strategy->optimizer_state());
      });
    }
  }
}

/// Three parameters by name, of which two are one. All fit into the first rank's shard.
struct TiedInTheMiddle : torch::nn::Module {
  TiedInTheMiddle() {
    register_module("second", second);
    second->register_parameter("first", first);
    last = second->register_parameter("last", at::full({4}, 2.0));
  }
  at::Tensor first = register_parameter("first", at::ones({4}));
  std::shared_ptr<torch::nn::Module> second = std::make_shared<torch::nn::Module>("second");
  at::Tensor last;
};

struct TiedTask {
  std::shared_ptr<TiedInTheMiddle> module = std::make_shared<TiedInTheMiddle>();
  std::unique_ptr<Strategy> strategy;

  TiedTask(const ProcessGroup& group, const std::string& kind, const OptimizerFactory& make) {
    const StrategySetup setup{.module = module, .make_optimizer = make, .group = group};
    strategy = kind == "ddp" ? make_ddp_strategy(setup) : make_fsdp_strategy(setup);
    const auto loss = [&] {
      return (values({4}, 1) * module->first * module->last).square().sum();
    };
    strategy->run_batch({.loss = loss});
    strategy->step();
    strategy->zero_grad();
  }
};

TEST(FsdpStrategy, ATiedParameterHasOneNumberInTheState) {
  test::run_group(2, [](ProcessGroup group) {
    const auto adam = [](std::vector<at::Tensor> parameters) {
      return make_optimizer("adam", std::move(parameters), {.lr = 0.01});
    };
    TiedTask ddp(group, "ddp", adam), fsdp(group, "fsdp", adam);
    const StateDict whole = ddp.strategy->optimizer_state();
    expect_same(fsdp.strategy->optimizer_state(), whole);
    fsdp.strategy->load_optimizer_state(on_all_ranks(group, whole));
    expect_same(fsdp.strategy->optimizer_state(), whole);
  });
}

/// Has entries for all tensors from its construction, as float32 copies of parameters are.
struct EntriesFromTheStart : Sgd {
  using Sgd::Sgd;
  StateDict state() const override {
    StateDict state;
    for (size_t i = 0; i < parameters().size(); ++i) {
      state.emplace_back("kept." + std::to_string(i), parameters()[i].detach());
    }
    return state;
  }
  void load_state(const StateDict& given) override { loaded = given.size(); }
  size_t loaded = 0;
};

/// Its optimizer has a tensor without elements, of which the module knows nothing.
TEST(FsdpStrategy, ARankWithoutParametersGivesNoState) {
  test::run_group(2, [](ProcessGroup group) {
    EntriesFromTheStart* optimizer = nullptr;
    TiedTask task(group, "fsdp", [&](std::vector<at::Tensor> parameters) {
      auto made = std::make_unique<EntriesFromTheStart>(std::move(parameters), OptimizerOptions());
      optimizer = made.get();
      return made;
    });
    ASSERT_EQ(optimizer->parameters()[0].numel(), group.rank() == 0 ? 4 : 0);
    const StateDict whole = task.strategy->optimizer_state();
    EXPECT_EQ(whole.size(), group.rank() == 0 ? 2u : 0u);
    task.strategy->load_optimizer_state(on_all_ranks(group, whole));
    EXPECT_EQ(optimizer->loaded, group.rank() == 0 ? 2u : 0u);
  });
}

TEST(FsdpStrategy, KeepsAnNthOfAllState) {
  for (const int size : {1, 2, 4}) {
    over_shared_memory(size, [&](ProcessGroup group) {
      Task task(group, "fsdp");
      task.train(1);
      task.batch(1);
      int64_t elements = 0;
      for (const at::Tensor& parameter : task.model->parameters()) elements += parameter.numel();
      const StateBytes bytes = task.strategy->state_bytes();
      EXPECT_LE(bytes.total(), 1.05 * 16 * elements / size);
      EXPECT_GE(bytes.parameters, 4 * elements / size);
      EXPECT_GE(bytes.gradients, 4 * elements / size);
    });
  }
}

TEST(FsdpStrategy, EvaluatesWithoutAGraph) {
  for (const bool share : {true, false}) {
    over_shared_memory(2, [&](ProcessGroup group) {
      TaskOptions options{.fsdp = layers_as_units(share)};
      Task ddp(group, "ddp", options), fsdp(group, "fsdp", options);
      for (int round = 0; round < 3; ++round) {
        ddp.train(1);
        fsdp.train(1);
        const auto x = values({4, 784}, group.rank());
        const auto a = ddp.strategy->predict([&] { return ddp.model->forward(x); }, x);
        const auto b = fsdp.strategy->predict([&] { return fsdp.model->forward(x); }, x);
        EXPECT_TRUE(at::equal(*a, *b));
        EXPECT_FALSE(b->requires_grad());
      }
    });
  }
}

TEST(FsdpStrategy, AccumulationReducesEachBatch) {
  over_shared_memory(2, [](ProcessGroup group) {
    Task ddp(group, "ddp"), fsdp(group, "fsdp");
    for (int step = 0; step < 2; ++step) {
      for (Task* task : {&ddp, &fsdp}) {
        task->batch(2 * step, /*last=*/false);
        if (task == &fsdp) {
          EXPECT_FALSE(task->model->parameters()[0].grad().defined());
          EXPECT_THROW(task->strategy->step(), UsageError);
        }
        task->batch(2 * step + 1);
        task->strategy->step();
        task->strategy->zero_grad();
      }
    }
    // (a0 + a1) / 2 + (b0 + b1) / 2 has other roundings than (a0 + b0) / 2 + (a1 + b1) / 2, and
    // Adam's first steps of size lr follow the sign of what is near 0.
    expect_same(fsdp.strategy->model_state(), ddp.strategy->model_state(), 2e-3);
  });
}

TEST(FsdpStrategy, AutocastHasTheBitsThatItHasWithDdp) {
  struct Autocast {
    Autocast() {
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      at::autocast::set_autocast_enabled(at::kCPU, true);
    }
    ~Autocast() {
      at::autocast::set_autocast_enabled(at::kCPU, false);
      at::autocast::clear_cache();
    }
  };
  for (const bool share : {true, false}) {
    over_shared_memory(2, [&](ProcessGroup group) {
      TaskOptions options{.fsdp = layers_as_units(share)};
      options.common.forward_context = [] { return std::make_shared<Autocast>(); };
      Task ddp(group, "ddp", options), fsdp(group, "fsdp", options);
      ddp.train(3);
      fsdp.train(3);
      expect_same(fsdp.strategy->model_state(), ddp.strategy->model_state());
    });
  }
}

TEST(FsdpStrategy, AScaledStepThatFoundInfinitiesChangesNothing) {
  over_shared_memory(2, [](ProcessGroup group) {
    Task task(group, "fsdp");
    task.train(1);
    const StateDict before = copy(task.strategy->model_state());
    task.batch(1);
    StepScale scale;
    scale.grad_scale = at::ones({1});
    scale.found_inf = at::ones({1});
    task.strategy->step(scale);
    expect_same(task.strategy->model_state(), before);
    scale.found_inf.zero_();
    task.strategy->step(scale);
    const StateDict after = task.strategy->model_state();
    if (group.rank() == 0) {
      EXPECT_FALSE(at::equal(after[0].second, before[0].second));
    }
  });
}

TEST(FsdpStrategy, AStateThatDoesNotFitIsRefusedByName) {
  over_shared_memory(2, [](ProcessGroup group) {
    Task task(group, "fsdp");
    task.train(1);
    StateDict state = on_all_ranks(group, task.strategy->optimizer_state());
    const auto refused = [&](const StateDict& wrong, const char* told) {
      try {
        task.strategy->load_optimizer_state(wrong);
        ADD_FAILURE() << "accepted: " << told;
      } catch (const CheckpointError& error) {
        EXPECT_THAT(error.what(), HasSubstr(told));
      }
    };
    refused({{"exp_avg.77", at::zeros({3})}}, "exp_avg.77");
    refused({{"exp_avg.0", at::zeros({3})}}, "exp_avg.0");
    refused({{"exp_avg", at::zeros({3})}}, "NAME.parameter-index");
    StateDict model = on_all_ranks(group, task.strategy->model_state());
    model.pop_back();
    EXPECT_THROW(task.strategy->load_model_state(model), CheckpointError);
  });
}

/// TorchScript's interpreter throws another exception for one within it, and so may a user.
TEST(FsdpStrategy, ALostRankIsACommErrorWhateverForwardMakesOfIt) {
  test::run_group(2,
                  [](ProcessGroup group) {
                    Task task(group, "fsdp", {.fsdp = layers_as_units(false)});
                    if (group.rank() == 1) return;
                    group.set_timeout(std::chrono::milliseconds(2000));
                    const auto forward = [&]() -> at::Tensor {
                      try {
                        return task.model->forward(values({2, 784}, 1)).sum();
                      } catch (const std::exception& error) {
                        throw std::runtime_error("an error in the interpreter");
                      }
                    };
                    EXPECT_THROW(task.strategy->run_batch({.loss = forward}), CommError);
                  },
                  {.backend = "gloo"});
}

TEST(FsdpStrategy, AStateSavedWithARankMissingNamesTheRank) {
  test::RankOptions options;
  options.backend = "shm";
  options.timeout = std::chrono::milliseconds(700);
  std::promise<void> given_up;
  auto waits = given_up.get_future();
  test::run_group(
      2,
      [&](ProcessGroup group) {
        Task task(group, "fsdp");
        if (group.rank() == 1) return waits.wait();
        try {
          task.strategy->model_state();
          ADD_FAILURE() << "saved without rank 1";
        } catch (const TimeoutError& error) {
          EXPECT_THAT(error.what(), HasSubstr("rank 1"));
        }
        given_up.set_value();
      },
      options);
}

}  // namespace fsdp_strategy_test
}  // namespace lockstep
