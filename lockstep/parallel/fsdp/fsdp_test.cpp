// FullyShardedDataParallel in a program's own loop, with modules of many kinds.
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/state_dict.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <algorithm>
#include <mutex>
#include <sstream>

#include "lockstep/autograd/activation_checkpoint.h"
#include "lockstep/autograd/backward.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/check_equal.h"
#include "lockstep/parallel/ddp.h"
#include "tests/support/ddp_test_modules.h"
#include "tests/support/message_of.h"
#include "tests/support/over_backends.h"
#include "tests/support/zero_training.h"

namespace lockstep {
namespace fsdp_test {

using ddp_test::Counter;
using ddp_test::fill;
using ddp_test::Lookup;
using ddp_test::Repeated;
using ddp_test::Rich;
using ddp_test::Switch;
using ddp_test::Tied;
using ddp_test::values;
using ::testing::HasSubstr;

/// Every rank of two has a part of each layer.
struct Net : torch::nn::Module {
  Net() {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::tanh(first(x))); }
  torch::nn::Linear first{6, 40}, second{40, 3};
};

template <class Module>
std::shared_ptr<Module> filled(double seed) {
  auto module = std::make_shared<Module>();
  fill(*module, seed);
  return module;
}

at::Tensor input(int rank, int step = 0) {
  return values({4, 6}, 10 * rank + step);
}

/// Everything is gathered, and every child is a unit.
FsdpOptions gathered() {
  FsdpOptions options;
  options.units = {"*"};
  options.share_memory = false;
  return options;
}

FsdpOptions in_common() {
  FsdpOptions options = gathered();
  options.share_memory = true;
  return options;
}

std::vector<at::Tensor> whole(const StateDict& state) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : state) tensors.push_back(tensor);
  return tensors;
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << "tensor " << i;
}

std::unique_ptr<Optimizer> adam(const std::vector<at::Tensor>& parameters) {
  return make_optimizer("adam", parameters, {.lr = 0.01});
}

void over_shared_memory(int size, const std::function<void(ProcessGroup)>& body) {
  test::run_group(size, body, {.backend = "shm"});
}

/// Trains a module with DDP and with FSDP on the same batches and compares rank 0's states.
template <class Module, class Loss>
void expect_bits_of_ddp(int size, const FsdpOptions& options, const Loss& loss) {
  over_shared_memory(size, [&](ProcessGroup group) {
    auto a = filled<Module>(1), b = filled<Module>(1 + group.rank());
    DistributedDataParallel ddp(a, group);
    FullyShardedDataParallel fsdp(b, group, options);
    auto ddp_adam = adam(a->parameters()), fsdp_adam = adam(fsdp.parameters());
    for (int step = 0; step < 4; ++step) {
      loss(ddp, group.rank(), step).backward();
      ddp_adam->step();
      zero_grad(a->parameters());
      // Both ways of running backward.
      const at::Tensor value = loss(fsdp, group.rank(), step);
      step % 2 == 0 ? value.backward() : backward(value);
      fsdp_adam->step();
      zero_grad(fsdp.parameters());
    }
    const auto state = whole(fsdp.full_state_dict());
    if (group.rank() == 0) expect_equal(state, a->parameters());
  });
}

struct Checkpointed : Net {
  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor x = checkpoint([&](const at::Tensor& v) { return at::tanh(first(v)); }, input);
    return checkpoint([&](const at::Tensor& v) { return second(v); }, x);
  }
};

TEST(Fsdp, ACheckpointedLayerRunsOnceInABackward) {
  for (FsdpOptions options : {gathered(), in_common()}) {
    for (const bool find_unused : {false, true}) {
      options.find_unused_parameters = find_unused;
      // The end of a checkpoint's own backward is not the end of the backward.
      expect_bits_of_ddp<Checkpointed>(2, options, [](auto& net, int rank, int step) {
        return net.forward(input(rank, step)).square().sum();
      });
      over_shared_memory(2, [&](ProcessGroup group) {
        FullyShardedDataParallel fsdp(filled<Repeated>(1), group, options);
        EXPECT_THAT(test::message_of([&] { fsdp.forward(input(0), 2).sum().backward(); }),
                    HasSubstr("rank " + std::to_string(group.rank()) + ": backward gave block."));
      });
    }
  }
}

TEST(Fsdp, ValuesThatArePutInAfterWrappingAreTrained) {
  FsdpOptions bfloat = gathered();
  bfloat.parameter_dtype = at::kBFloat16;
  for (const FsdpOptions& options : {gathered(), in_common(), bfloat}) {
    over_shared_memory(2, [&](ProcessGroup group) {
      auto a = filled<Net>(1), b = filled<Net>(1);
      DistributedDataParallel ddp(a, group);
      FullyShardedDataParallel fsdp(b, group, options);
      auto ddp_adam = adam(a->parameters()), fsdp_adam = adam(fsdp.parameters());
      const auto expect_same_state = [&] {
        const auto state = whole(fsdp.full_state_dict());
        if (group.rank() == 0 && !options.parameter_dtype) expect_equal(state, a->parameters());
        for (size_t i = 0; i < state.size(); ++i)
          EXPECT_TRUE(at::allclose(state[i], a->parameters()[i], 0, 0.02)) << i;
      };
      for (int step = 0; step < 6; ++step) {
        if (step % 3 == 0) {
          std::stringstream file;
          torch::save(filled<Net>(3 + step), file);
          std::stringstream again(file.str());
          torch::load(a, file);
          torch::load(b, again);
          if (step == 3) expect_same_state();
        }
        const auto train = [&](auto& net) {
          net.forward(input(group.rank(), step)).square().sum().backward();
        };
        train(ddp), train(fsdp);
        ddp_adam->step(), fsdp_adam->step();
        zero_grad(a->parameters()), zero_grad(fsdp.parameters());
        expect_same_state();
      }
      if (options.parameter_dtype) return;
      b->to(at::kDouble);
      EXPECT_THAT(test::message_of([&] { fsdp.forward(input(0).to(at::kDouble)); }),
                  ::testing::AllOf(HasSubstr("rank " + std::to_string(group.rank())),
                                   HasSubstr("parameter first.weight"), HasSubstr("Double")));
    });
  }
}

TEST(Fsdp, LayersThatAreFrozenOrUnfrozenAfterWrappingAreNamed) {
  for (const FsdpOptions& options : {gathered(), in_common()}) {
    for (const bool begins_frozen : {false, true}) {
      over_shared_memory(2, [&](ProcessGroup group) {
        auto net = filled<Net>(1);
        net->first->bias.requires_grad_(!begins_frozen);
        FullyShardedDataParallel fsdp(net, group, options);
        fsdp.forward(input(group.rank())).sum().backward();
        net->first->bias.requires_grad_(begins_frozen);
        EXPECT_THAT(test::message_of([&] { fsdp.forward(input(0)).sum().backward(); }),
                    ::testing::AllOf(HasSubstr("rank " + std::to_string(group.rank())),
                                     HasSubstr("parameter first.bias")));
        for (at::Tensor& parameter : net->parameters()) parameter.requires_grad_(false);
        EXPECT_NO_THROW(fsdp.forward(input(0)));
      });
    }
  }
}

TEST(Fsdp, SeveralForwardsThenSeveralBackwardsAreAveraged) {
  over_shared_memory(2, [&](ProcessGroup group) {
    for (const FsdpOptions& options : {gathered(), in_common()}) {
      auto a = filled<Net>(1), b = filled<Net>(1);
      DistributedDataParallel ddp(a, group);
      FullyShardedDataParallel fsdp(b, group, options);
      auto ddp_sgd = make_optimizer("sgd", a->parameters(), {.lr = 0.1});
      auto fsdp_sgd = make_optimizer("sgd", fsdp.parameters(), {.lr = 0.1});
      for (int step = 0; step < 3; ++step) {
        const auto run = [&](auto& net) {
          const at::Tensor first = net.forward(input(group.rank(), step)).square().sum();
          const at::Tensor second = net.forward(input(group.rank(), step + 7)).abs().sum();
          first.backward();
          second.backward();
        };
        run(ddp), run(fsdp);
        ddp_sgd->step(), fsdp_sgd->step();
        zero_grad(a->parameters()), zero_grad(fsdp.parameters());
      }
      const auto state = whole(fsdp.full_state_dict());
      for (size_t i = 0; i < state.size(); ++i)
        EXPECT_TRUE(at::allclose(state[i], a->parameters()[i], 1e-5, 1e-6)) << i;
    }
  });
}

TEST(Fsdp, TrainsModulesToTheBitsOfDdp) {
  for (const FsdpOptions& options : {gathered(), in_common()}) {
    for (const int size : {1, 2, 3}) {
      expect_bits_of_ddp<Net>(size, options, [](auto& net, int rank, int step) {
        return net.forward(input(rank, step)).square().sum();
      });
      expect_bits_of_ddp<Rich>(size, options, [](auto& net, int rank, int step) {
        const std::tuple<at::Tensor, at::Tensor> inputs{input(rank, step), input(rank + 5, step)};
        const auto answer = net.forward(inputs, 2.0);
        return answer.logits.sum() + answer.extra.at("other").square().sum();
      });
    }
  }
}

TEST(Fsdp, FreesUnitsAndForetellsTheirUse) {
  test::run_group(2, [](ProcessGroup group) {
    auto net = filled<Net>(1);
    FullyShardedDataParallel fsdp(net, group, gathered());
    EXPECT_THAT(fsdp.statistics().units, ::testing::ElementsAre("first", "second"));
    EXPECT_FALSE(fsdp.statistics().shared_memory);
    const auto is_empty = [&] {
      for (const at::Tensor& parameter : net->parameters())
        EXPECT_THROW(parameter.const_data_ptr(), c10::Error);
    };
    is_empty();
    for (int step = 0; step < 3; ++step) {
      auto loss = fsdp.forward(input(group.rank())).square().sum();
      EXPECT_NO_THROW(net->second->weight.const_data_ptr());
      loss.backward();
      is_empty();
      // After the first backward they have gradients that cannot be used.
      for (const at::Tensor& parameter : net->parameters())
        EXPECT_EQ(parameter.grad().defined(), step == 0);
      for (const at::Tensor& shard : fsdp.parameters()) EXPECT_TRUE(shard.grad().defined());
      EXPECT_EQ(fsdp.statistics().gathers, 2 * (step + 1));
      EXPECT_EQ(fsdp.statistics().foretold_gathers, step);  // Of `second`.
      EXPECT_EQ(fsdp.statistics().reductions, 2 * (step + 1));
    }
  });
}

/// As PyTorch's FSDP2 takes the module's parameters, so would a newcomer. The loss would stay.
TEST(Fsdp, AnOptimizerOfTheModulesOwnParametersIsRefusedAtItsFirstStep) {
  for (const FsdpOptions& options : {gathered(), in_common()}) {
    for (const int size : {1, 2}) {
      over_shared_memory(size, [&](ProcessGroup group) {
        auto net = filled<Net>(1);
        const std::vector<at::Tensor> early = net->parameters();
        FullyShardedDataParallel fsdp(net, group, options);
        torch::optim::SGD sgd(early, 0.05);
        torch::optim::SGD heavy(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
        torch::optim::Adam adam_of_module(net->parameters());
        fsdp.forward(input(group.rank())).square().sum().backward();
        for (torch::optim::Optimizer* const optimizer :
             std::initializer_list<torch::optim::Optimizer*>{&sgd, &heavy, &adam_of_module}) {
          EXPECT_THROW(optimizer->step(), UsageError);
        }
        EXPECT_THROW(clip_grad_norm(net->parameters(), 1), UsageError);
        EXPECT_GT(fsdp.clip_grad_norm(1), 0);
        zero_grad(net->parameters());
        fsdp.forward(input(group.rank())).square().sum().backward();
        adam(fsdp.parameters())->step();
      });
    }
  }
}

/// As World::check_equal does.
TEST(Fsdp, ItsModuleCanBeComparedAsAWhole) {
  for (const FsdpOptions& options : {gathered(), in_common()}) {
    over_shared_memory(2, [&](ProcessGroup group) {
      auto net = filled<Net>(1);
      FullyShardedDataParallel fsdp(net, group, options);
      fsdp.forward(input(group.rank())).square().sum().backward();
      detail::Compared whole{.what = "test"};
      for (const auto& item : net->named_parameters())
        whole.tensors.emplace_back(item.key(), item.value().detach());
      detail::check_equal(whole, group);
    });
  }
}

/// A graph may have two backwards without a forward between them.
TEST(Fsdp, TheFirstBackwardMayBeFollowedByAnother) {
  over_shared_memory(2, [&](ProcessGroup group) {
    auto net = filled<Net>(1);
    FullyShardedDataParallel fsdp(net, group, gathered());
    const auto a = fsdp.forward(input(group.rank())).sum();
    a.backward({}, /*keep_graph=*/true);
    a.backward();
    const auto b = fsdp.forward(input(1)).sum(), c = fsdp.forward(input(2)).sum();
    b.backward();
    c.backward();
    for (const at::Tensor& shard : fsdp.parameters()) EXPECT_TRUE(shard.grad().defined());
  });
}

/// Buffers made under it must not be written to later.
// Over memory in common another rank may be in its optimizer's step meanwhile.
TEST(Fsdp, TorchSaveOfOneRankIsAnErrorAndOfWholeParametersIsRight) {
  for (const FsdpOptions& options : {gathered(), in_common()}) {
    over_shared_memory(2, [&](ProcessGroup group) {
      auto net = filled<Net>(1);
      FullyShardedDataParallel fsdp(net, group, options);
      const auto optimizer = adam(fsdp.parameters());
      fsdp.forward(input(group.rank())).sum().backward();
      optimizer->step();
      std::stringstream file;
      if (group.rank() == 0) {
        EXPECT_THROW(torch::save(net, file), c10::Error);
      }
      const StateDict state = fsdp.full_state_dict();
      file.str({});
      {
        const auto full = fsdp.full_parameters();
        torch::save(net, file);
      }
      auto saved = filled<Net>(2);
      torch::load(saved, file);
      const auto parameters = saved->named_parameters();
      for (const auto& [name, tensor] : state)
        if (const auto* parameter = parameters.find(name)) {
          EXPECT_TRUE(at::equal(*parameter, tensor)) << name;
        }
    });
  }
}

TEST(Fsdp, TrainsAfterAnEvaluationInInferenceMode) {
  for (const std::string backend : {"shm", "gloo"}) {
    for (const FsdpOptions& options : {gathered(), in_common()}) {
      test::run_group(
          2,
          [&](ProcessGroup group) {
            auto plain = filled<Net>(1), evaluated = filled<Net>(1);
            FullyShardedDataParallel one(plain, group, options), other(evaluated, group, options);
            auto one_adam = adam(one.parameters()), other_adam = adam(other.parameters());
            for (int step = 0; step < 2; ++step) {
              {
                const c10::InferenceMode inference;
                EXPECT_TRUE(at::isfinite(other.forward(input(0))).all().item<bool>());
              }
              for (auto* each : {&one, &other}) {
                backward(each->forward(input(group.rank(), step)).square().sum());
                (each == &one ? one_adam : other_adam)->step();
                zero_grad(each->parameters());
              }
            }
            for (size_t i = 0; i < one.parameters().size(); ++i)
              EXPECT_TRUE(at::equal(one.parameters()[i], other.parameters()[i])) << i;
          },
          {.backend = backend});
    }
  }
}

TEST(Fsdp, AParameterCanBeReadAnywhereOnAllRanks) {
  for (const FsdpOptions& options : {gathered(), in_common()}) {
    over_shared_memory(2, [&](ProcessGroup group) {
      auto net = filled<Net>(3), same = filled<Net>(3);
      FullyShardedDataParallel fsdp(net, group, options);
      EXPECT_TRUE(at::equal(net->first->weight, same->first->weight));
      EXPECT_EQ(net->first->weight.norm().item<float>(), same->first->weight.norm().item<float>());
      std::ostringstream printed, expected;
      printed << net->second->bias;
      expected << same->second->bias;
      EXPECT_EQ(printed.str(), expected.str());
      // A view too, and later.
      const at::Tensor row = net->first->weight.detach()[2];
      EXPECT_TRUE(at::equal(row, same->first->weight[2]));
      // A copy is an ordinary tensor.
      at::Tensor copy = net->first->weight.detach().clone();
      copy.mul_(2);
      EXPECT_TRUE(at::equal(copy, same->first->weight * 2));
    });
  }
}

TEST(Fsdp, WritingToAParameterIsAnErrorThatSaysHowTo) {
  for (const FsdpOptions& options : {gathered(), in_common()}) {
    over_shared_memory(2, [&](ProcessGroup group) {
      auto net = filled<Net>(3);
      FullyShardedDataParallel fsdp(net, group, options);
      const at::NoGradGuard no_grad;
      try {
        net->first->weight.mul_(2);
        ADD_FAILURE() << "written";
      } catch (const UsageError& error) {
        EXPECT_THAT(error.what(), HasSubstr("mul_"));
        EXPECT_THAT(error.what(), HasSubstr("full_parameters"));
      }
      EXPECT_THROW(net->second->bias.detach().fill_(0), UsageError);
      {
        const auto full = fsdp.full_parameters(/*writable=*/true);
        net->first->weight.mul_(2);
        EXPECT_THROW((void)fsdp.full_parameters(), UsageError);
      }
      EXPECT_TRUE(at::equal(net->first->weight, filled<Net>(3)->first->weight * 2));
      EXPECT_TRUE(at::equal(net->second->weight, filled<Net>(3)->second->weight));
      {
        const auto full = fsdp.full_parameters();
        EXPECT_THROW(net->first->weight.zero_(), UsageError);
      }
    });
  }
}

TEST(Fsdp, TiedParametersAreOne) {
  for (const FsdpOptions& base : {gathered(), in_common()}) {
    FsdpOptions options = base;
    options.units = {};
    over_shared_memory(2, [&](ProcessGroup group) {
      auto tied = filled<Tied>(1);
      FullyShardedDataParallel fsdp(tied, group, options);
      auto optimizer = adam(fsdp.parameters());
      auto alone = filled<Tied>(1);
      // The clone's two names are one tensor, which one optimizer steps once.
      auto plain = adam({alone->weight});
      for (int step = 0; step < 3; ++step) {
        const auto x = values({3, 4}, step);
        alone->forward(x).square().sum().backward();
        plain->step();
        zero_grad({alone->weight});
        fsdp.forward(x).square().sum().backward();
        optimizer->step();
        zero_grad(fsdp.parameters());
      }
      EXPECT_TRUE(at::equal(tied->weight, alone->weight));
      const auto state = fsdp.full_state_dict();
      if (group.rank() == 0) {
        ASSERT_EQ(state.size(), 2u);
        expect_equal({state[1].second}, {state[0].second});
      }
    });
  }
}

TEST(Fsdp, FrozenParametersStayAndGetNoShardToOptimize) {
  for (const FsdpOptions& options : {gathered(), in_common()}) {
    over_shared_memory(2, [&](ProcessGroup group) {
      auto net = filled<Net>(1), alone = filled<Net>(1);
      for (auto& module : {net, alone}) module->first->weight.requires_grad_(false);
      FullyShardedDataParallel fsdp(net, group, options);
      auto optimizer = adam(fsdp.parameters()), plain = adam(alone->parameters());
      for (int step = 0; step < 3; ++step) {
        fsdp.forward(input(0, step)).square().sum().backward();
        optimizer->step();
        zero_grad(fsdp.parameters());
        alone->forward(input(0, step)).square().sum().backward();
        plain->step();
        zero_grad(alone->parameters());
      }
      const auto state = whole(fsdp.full_state_dict());
      if (group.rank() == 0) expect_equal(state, alone->parameters());
    });
  }
}

TEST(Fsdp, KeepsTheOptimizersStateOfALayerThatIsFrozenOnResume) {
  for (const FsdpOptions& options : {gathered(), in_common()}) {
    over_shared_memory(2, [&](ProcessGroup group) {
      auto plain = filled<Net>(1), resumed = filled<Net>(1);
      const auto whole_optimizer = adam(plain->parameters());
      plain->forward(input(0)).square().sum().backward();
      whole_optimizer->step();
      resumed->first->weight.requires_grad_(false);
      FullyShardedDataParallel fsdp(resumed, group, options);
      const auto optimizer = adam(fsdp.parameters());
      optimizer->load_state(fsdp.own_optimizer_state(whole_optimizer->state()));
      fsdp.forward(input(0)).square().sum().backward();
      optimizer->step();
      const auto state = fsdp.full_optimizer_state(optimizer->state());
      if (group.rank() != 0) return;
      const auto parameters = resumed->parameters();
      const auto frozen = std::find_if(parameters.begin(), parameters.end(), [&](const auto& each) {
        return each.is_same(resumed->first->weight);
      });
      zero_test::expect_same_entries(whole_optimizer->state(), state,
                                     {static_cast<size_t>(frozen - parameters.begin())});
    });
  }
}

TEST(Fsdp, AParameterWithoutAGradientIsAnErrorThatNamesIt) {
  for (const FsdpOptions& options : {gathered(), in_common()}) {
    over_shared_memory(2, [&](ProcessGroup group) {
      auto net = filled<Switch>(1);
      FullyShardedDataParallel fsdp(net, group, options);
      fsdp.forward(input(0), true).sum().backward();
      try {
        fsdp.forward(input(0), true);
        ADD_FAILURE() << "went on";
      } catch (const UsageError& error) {
        EXPECT_THAT(error.what(), HasSubstr("right.weight"));
        EXPECT_THAT(error.what(), HasSubstr("find_unused_parameters"));
      }
    });
  }
}

TEST(Fsdp, UnusedParametersCountAsZeros) {
  for (FsdpOptions options : {gathered(), in_common()}) {
    options.find_unused_parameters = true;
    over_shared_memory(2, [&](ProcessGroup group) {
      auto net = filled<Switch>(1);
      FullyShardedDataParallel fsdp(net, group, options);
      // The ranks use different heads, and the gathers come in one order all the same.
      const bool left = options.share_memory ? group.rank() == 0 : true;
      for (int step = 0; step < 2; ++step) fsdp.forward(input(0), left).sum().backward();
      auto alone = filled<Switch>(1);
      alone->forward(input(0), left).sum().backward();
      for (const at::Tensor& shard : fsdp.parameters())
        EXPECT_EQ(shard.grad().defined(), shard.numel() > 0);
    });
  }
}

TEST(Fsdp, RanksThatUseDifferentModulesAreToldSo) {
  FsdpOptions options = gathered();
  options.find_unused_parameters = true;
  over_shared_memory(2, [&](ProcessGroup group) {
    auto net = filled<Switch>(1);
    FullyShardedDataParallel fsdp(net, group, options);
    try {
      // Both heads are of one size.
      fsdp.forward(input(0), group.rank() == 0);
      // Only rank 0 need see it: rank 1 compares with its own number.
      EXPECT_EQ(group.rank(), 1);
    } catch (const MismatchError& error) {
      EXPECT_THAT(error.what(), HasSubstr("same modules in the same order"));
    }
  });
}

TEST(Fsdp, NoSyncHasTheBitsOfDdpsNoSync) {
  for (const FsdpOptions& options : {gathered(), in_common()}) {
    over_shared_memory(2, [&](ProcessGroup group) {
      auto a = filled<Net>(1), b = filled<Net>(1);
      DistributedDataParallel ddp(a, group);
      FullyShardedDataParallel fsdp(b, group, options);
      const auto run = [&](auto& wrapper) {
        {
          const auto guard = wrapper.no_sync();
          wrapper.forward(input(group.rank(), 0)).square().sum().backward();
        }
        if constexpr (requires { wrapper.clip_grad_norm(1); }) {
          EXPECT_THROW(wrapper.clip_grad_norm(1), UsageError);
        }
        wrapper.forward(input(group.rank(), 1)).square().sum().backward();
      };
      auto ddp_adam = adam(a->parameters()), fsdp_adam = adam(fsdp.parameters());
      run(ddp);
      run(fsdp);
      ddp_adam->step();
      fsdp_adam->step();
      const auto state = whole(fsdp.full_state_dict());
      if (group.rank() == 0) expect_equal(state, a->parameters());
    });
  }
}

/// As the stage of a pipeline by hand does: forwards, then backwards, of which the last averages.
TEST(Fsdp, MicroBatchesShareOneGathering) {
  for (const FsdpOptions& options : {gathered(), in_common()}) {
    over_shared_memory(2, [&](ProcessGroup group) {
      auto a = filled<Net>(1), b = filled<Net>(1);
      DistributedDataParallel ddp(a, group);
      FullyShardedDataParallel fsdp(b, group, options);
      const auto run = [&](auto& wrapper) {
        std::vector<at::Tensor> losses;
        for (int i = 0; i < 3; ++i)
          losses.push_back(wrapper.forward(input(group.rank(), i)).square().sum());
        for (int i = 0; i < 2; ++i) {
          const auto guard = wrapper.no_sync();
          losses[static_cast<size_t>(i)].backward();
        }
        losses.back().backward();
      };
      auto ddp_adam = adam(a->parameters()), fsdp_adam = adam(fsdp.parameters());
      for (int step = 0; step < 2; ++step) {
        run(ddp);
        {
          const auto guard = fsdp.full_parameters();
          const int64_t before = fsdp.statistics().gathers;
          run(fsdp);
          EXPECT_EQ(fsdp.statistics().gathers, before);
        }
        ddp_adam->step();
        fsdp_adam->step();
        zero_grad(a->parameters());
        zero_grad(fsdp.parameters());
      }
      const auto state = whole(fsdp.full_state_dict());
      if (group.rank() == 0) expect_equal(state, a->parameters());
    });
  }
}

/// Over two replicas, from the values and buffers of rank 0. The mean is a sum of two sums.
TEST(Fsdp, AMeshHasReplicas) {
  for (const FsdpOptions& options : {gathered(), in_common()}) {
    over_shared_memory(4, [&](ProcessGroup group) {
      const DeviceMesh mesh = init_device_mesh(group, "dp_replicate=2,dp_shard=2");
      auto a = filled<Counter>(1), b = filled<Counter>(1 + group.rank());
      DistributedDataParallel ddp(a, group);
      FullyShardedDataParallel fsdp(b, mesh, options);
      auto ddp_adam = adam(a->parameters()), fsdp_adam = adam(fsdp.parameters());
      for (int step = 0; step < 3; ++step) {
        ddp.forward(input(group.rank(), step)).square().sum().backward();
        fsdp.forward(input(group.rank(), step)).square().sum().backward();
        fsdp.clip_grad_norm(0.5);
        clip_grad_norm(a->parameters(), 0.5);
        ddp_adam->step();
        fsdp_adam->step();
        zero_grad(a->parameters());
        zero_grad(fsdp.parameters());
      }
      const StateDict state = fsdp.full_state_dict();
      EXPECT_EQ(state.empty(), mesh.get_local_rank("dp_shard") != 0);
      const StateDict expected = state_dict(*a);
      for (size_t i = 0; i < state.size(); ++i)
        EXPECT_TRUE(at::allclose(state[i].second, expected[i].second, 1e-5, 1e-7))
            << state[i].first;
    });
  }
}

TEST(Fsdp, AStepWithinNoSyncIsAnError) {
  for (const char* name : {"sgd", "adam"}) {
    over_shared_memory(2, [&](ProcessGroup group) {
      auto module = filled<Net>(1), twin = filled<Net>(1);
      FullyShardedDataParallel fsdp(module, group), other(twin, group);
      auto optimizer = make_optimizer(name, fsdp.parameters(), {.lr = 0.1});
      auto of_other = make_optimizer(name, other.parameters(), {.lr = 0.1});
      const auto add_up = [&](auto& wrapper) {
        const auto guard = wrapper.no_sync();
        wrapper.forward(input(group.rank(), 0)).square().sum().backward();
      };
      // After a backward that was averaged there are gradients, of a part of the step's batches.
      for (auto* wrapper : {&fsdp, &other}) {
        wrapper->forward(input(group.rank(), 2)).square().sum().backward();
        add_up(*wrapper);
      }
      try {
        optimizer->step();
        ADD_FAILURE() << name << " stepped";
      } catch (const UsageError& error) {
        EXPECT_THAT(error.what(), HasSubstr("while gradients only add up"));
        EXPECT_THAT(error.what(), HasSubstr("outside of no_sync"));
      }
      // Nothing has changed: the step goes on as if nobody had asked.
      for (auto* wrapper : {&fsdp, &other})
        wrapper->forward(input(group.rank(), 1)).square().sum().backward();
      optimizer->step();
      of_other->step();
      for (size_t i = 0; i < fsdp.parameters().size(); ++i)
        EXPECT_TRUE(at::equal(fsdp.parameters()[i], other.parameters()[i])) << name << " " << i;
    });
  }
}

TEST(Fsdp, BuffersAreRankZeros) {
  over_shared_memory(2, [](ProcessGroup group) {
    auto module = filled<Counter>(1);
    module->seen.fill_(group.rank() + 3);
    FullyShardedDataParallel fsdp(module, group);
    EXPECT_EQ(module->seen[1].item<float>(), 3);
    module->seen.fill_(group.rank() + 7);
    fsdp.forward(input(0)).sum().backward();
    EXPECT_EQ(module->seen[0].item<float>(), 7);
    // After a forward within no_sync they stay local once, as with DistributedDataParallel.
    {
      const auto local = fsdp.no_sync();
      fsdp.forward(input(0)).sum().backward();
    }
    module->seen.fill_(group.rank() + 9);
    fsdp.forward(input(0)).sum().backward();
    EXPECT_EQ(module->seen[0].item<float>(), group.rank() + 9);
    fsdp.forward(input(0)).sum().backward();
    EXPECT_EQ(module->seen[0].item<float>(), 9);
  });
}

TEST(Fsdp, OffloadChangesNothingOnTheCpu) {
  for (FsdpOptions options : {gathered(), in_common()}) {
    options.cpu_offload = true;
    expect_bits_of_ddp<Net>(2, options, [](auto& net, int rank, int step) {
      return net.forward(input(rank, step)).square().sum();
    });
  }
}

TEST(Fsdp, MoreRanksThanParameters) {
  struct One : torch::nn::Module {
    One() { weight = register_parameter("weight", at::ones({3})); }
    at::Tensor forward(const at::Tensor& x) { return weight * x; }
    at::Tensor weight;
  };
  for (const bool share : {true, false}) {
    FsdpOptions options;
    options.share_memory = share;
    over_shared_memory(3, [&](ProcessGroup group) {
      auto one = std::make_shared<One>();
      FullyShardedDataParallel fsdp(one, group, options);
      ASSERT_EQ(fsdp.parameters().size(), 1u);
      EXPECT_EQ(fsdp.parameters()[0].numel(), group.rank() == 0 ? 3 : 0);
      auto optimizer = adam(fsdp.parameters());
      fsdp.forward(at::full({3}, group.rank())).sum().backward();
      fsdp.clip_grad_norm(1e9);
      if (group.rank() == 0) {
        EXPECT_TRUE(at::allclose(fsdp.parameters()[0].grad(), at::ones({3})));
      }
    });
  }
}

TEST(Fsdp, GathersAndComputesInAnotherDtype) {
  FsdpOptions options = gathered();
  options.parameter_dtype = at::kBFloat16;
  options.reduce_dtype = at::kFloat;
  test::run_group(2, [&](ProcessGroup group) {
    auto net = filled<Net>(1), half = filled<Net>(1);
    half->to(at::kBFloat16);
    FullyShardedDataParallel fsdp(net, group, options);
    EXPECT_EQ(net->first->weight.scalar_type(), at::kBFloat16);
    EXPECT_EQ(fsdp.parameters()[0].scalar_type(), at::kFloat);
    // The input is converted where the first parameter meets it.
    const auto output = fsdp.forward(input(0));
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::equal(output, half->forward(input(0).to(at::kBFloat16))));
    output.square().sum().backward();
    half->forward(input(0).to(at::kBFloat16)).square().sum().backward();
    const auto gradient = half->first->weight.grad().to(at::kFloat).flatten();
    const auto& shard = fsdp.parameters()[0];
    if (group.rank() == 0) {
      EXPECT_TRUE(at::equal(shard.grad(), gradient.narrow(0, 0, shard.numel())));
    }
    // Shards, and so states, keep every bit.
    const auto state = whole(fsdp.full_state_dict());
    if (group.rank() == 0) expect_equal(state, filled<Net>(1)->parameters());
    EXPECT_THROW((void)fsdp.full_parameters(true), UsageError);
  });
}

TEST(Fsdp, AShardedStateIsLoadedByAnotherNumberOfRanks) {
  for (const int after : {1, 2, 3}) {
    std::mutex mutex;
    std::vector<TensorShard> all;
    over_shared_memory(2, [&](ProcessGroup group) {
      auto module = filled<Counter>(5);
      module->seen.fill_(6);
      FullyShardedDataParallel fsdp(module, group, gathered());
      const std::lock_guard lock(mutex);
      for (TensorShard shard : fsdp.sharded_state_dict()) {
        shard.values = shard.values.clone();
        all.push_back(shard);
      }
    });
    over_shared_memory(after, [&](ProcessGroup group) {
      auto module = filled<Counter>(1), same = filled<Counter>(5);
      FullyShardedDataParallel fsdp(module, group, gathered());
      fsdp.load_sharded_state_dict(all);
      expect_equal(module->parameters(), same->parameters());
      EXPECT_EQ(module->seen[1].item<float>(), 6);
      if (group.rank() != 0) return;
      std::vector<TensorShard> some = all;
      std::erase_if(some, [](const TensorShard& shard) { return shard.name == "linear.weight"; });
      try {
        fsdp.load_sharded_state_dict(some);
        ADD_FAILURE() << "accepted";
      } catch (const CheckpointError& error) {
        EXPECT_THAT(error.what(), HasSubstr("linear.weight"));
      }
    });
  }
}

TEST(Fsdp, WrongUseIsAnError) {
  EXPECT_THROW(FullyShardedDataParallel(filled<Net>(1), ProcessGroup()), UsageError);
  over_shared_memory(2, [](ProcessGroup group) {
    FsdpOptions options;
    options.units = {"frist"};
    try {
      FullyShardedDataParallel fsdp(filled<Net>(1), group, options);
      ADD_FAILURE() << "accepted";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("did you mean 'first'"));
    }
    auto other = filled<Net>(1);
    if (group.rank() == 1) other->first->weight.requires_grad_(false);
    EXPECT_THROW(FullyShardedDataParallel(other, group), MismatchError);
    // A sparse gradient has no place in a flat buffer.
    auto lookup = filled<Lookup>(1);
    FullyShardedDataParallel sparse(lookup, group);
    EXPECT_THROW(sparse.forward(at::arange(3)).backward(), UsageError);
  });
}

TEST(Fsdp, ACloneIsWholeAndAModuleOutlivesItsWrapperSayingSo) {
  over_shared_memory(2, [](ProcessGroup group) {
    auto linear = std::make_shared<torch::nn::LinearImpl>(6, 3);
    fill(*linear, 2);
    std::shared_ptr<torch::nn::Module> clone;
    {
      FullyShardedDataParallel fsdp(linear, group, [] {
        FsdpOptions options;
        options.share_memory = false;
        return options;
      }());
      clone = linear->clone();
    }
    auto same = std::make_shared<torch::nn::LinearImpl>(6, 3);
    fill(*same, 2);
    expect_equal(clone->parameters(), same->parameters());
    EXPECT_THROW(linear->forward(input(0)), UsageError);
  });
}

}  // namespace fsdp_test
}  // namespace lockstep
