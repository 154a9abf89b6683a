// Modules whose parameters were changed after they were wrapped.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/serialize.h>

#include <sstream>

#include "lockstep/autograd/backward.h"
#include "lockstep/base/error.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/gradient_averager.h"
#include "tests/support/ddp_test_modules.h"
#include "tests/support/mean_gradients.h"
#include "tests/support/message_of.h"
#include "tests/support/over_backends.h"

namespace lockstep {
namespace changed_parameters_test {

using ddp_test::expect_gradients;
using ddp_test::fill;
using ddp_test::mean_gradients;
using ddp_test::Net;
using ddp_test::Tensors;
using ddp_test::values;
using test::message_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::shared_ptr<Net> filled(double seed) {
  auto net = std::make_shared<Net>();
  fill(*net, seed);
  return net;
}

void put_in_by_load(const std::shared_ptr<Net>& net) {
  std::stringstream file;
  torch::save(filled(5), file);
  std::shared_ptr<Net> module = net;
  torch::load(module, file);
}

void put_in_by_set_data(const std::shared_ptr<Net>& net) {
  const auto other = filled(6);
  for (size_t i = 0; i < net->parameters().size(); ++i)
    net->parameters()[i].set_data(other->parameters()[i].detach());
}

/// Other nodes that add gradients, as a conversion and one back give.
void put_in_by_conversion(const std::shared_ptr<Net>& net) {
  net->zero_grad();
  net->to(at::kDouble);
  net->to(at::kFloat);
}

using PutIn = void (*)(const std::shared_ptr<Net>&);
constexpr PutIn kPutIn[] = {put_in_by_load, put_in_by_set_data, put_in_by_conversion};

const std::vector<DdpOptions>& all_options() {
  static const std::vector<DdpOptions> all = [] {
    std::vector<DdpOptions> made(4);
    made[1].gradient_as_bucket_view = false;
    made[2].static_graph = true;
    made[3].find_unused_parameters = true;
    return made;
  }();
  return all;
}

class ChangedParameters : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, ChangedParameters, test::over_backends(), test::backend_name);

/// One step, by LibTorch's backward and by ours in turn.
template <class Forward>
void step(Net& net, const ProcessGroup& group, int number, Forward&& forward) {
  const auto loss_of = [&](auto& one, int rank) {
    return one.forward(values({4, 6}, 10 * rank + number)).square().mean();
  };
  std::vector<bool> trained;
  for (const at::Tensor& parameter : net.parameters()) trained.push_back(parameter.requires_grad());
  Tensors expected = mean_gradients<Net>(
      group.size(), net, [&](Net& one, int rank) { loss_of(one, rank).backward(); });
  for (at::Tensor& parameter : net.parameters()) parameter.mutable_grad().reset();
  const at::Tensor loss = loss_of(forward, group.rank());
  number % 2 == 0 ? loss.backward() : backward(loss);
  for (size_t i = 0; i < trained.size(); ++i) {
    EXPECT_EQ(net.parameters()[i].grad().defined(), trained[i]) << i;
    if (!trained[i]) net.parameters()[i].mutable_grad() = expected[i];
  }
  expect_gradients(net, expected);
}

/// How, and from which step on: also before the first one.
std::vector<std::pair<PutIn, int>> loads() {
  std::vector<std::pair<PutIn, int>> all;
  for (const PutIn put_in : kPutIn) all.insert(all.end(), {{put_in, 0}, {put_in, 1}});
  return all;
}

TEST_P(ChangedParameters, ValuesThatAreLoadedAfterWrappingAreTrained) {
  for (const auto& [put_in, first] : loads()) {
    for (const DdpOptions& options : all_options()) {
      run_group(2, [&, put_in = put_in, first = first](ProcessGroup group) {
        const auto net = filled(1);
        DistributedDataParallel ddp(net, group, options);
        for (int number = 0; number < 6; ++number) {
          if (number >= first && number % 3 != 1) put_in(net);  // For each kind of backward.
          step(*net, group, number, ddp);
        }
      });
    }
    run_group(2, [&, put_in = put_in, first = first](ProcessGroup group) {
      const auto net = filled(1);
      GradientAverager averager(*net, group);
      for (int number = 0; number < 6; ++number) {
        if (number >= first && number % 3 != 1) put_in(net);  // For each kind of backward.
        step(*net, group, number, *net);
      }
    });
  }
}

TEST_P(ChangedParameters, AnotherDtypeIsRefusedByName) {
  run_group(2, [&](ProcessGroup group) {
    const auto net = filled(1), other = filled(1);
    DistributedDataParallel ddp(net, group);
    GradientAverager averager(*other, group);
    step(*net, group, 0, ddp);
    net->to(at::kDouble);
    other->to(at::kDouble);
    const at::Tensor x = values({4, 6}, 1).to(at::kDouble);
    const auto names = [&](const std::string& what) {
      return AllOf(HasSubstr(what + ", rank " + std::to_string(group.rank())),
                   HasSubstr("parameter first.weight"), HasSubstr("Double"));
    };
    EXPECT_THAT(message_of([&] { ddp(x); }), names("DistributedDataParallel"));
    EXPECT_THAT(message_of([&] { other->forward(x).sum().backward(); }), names("GradientAverager"));
  });
}

TEST_P(ChangedParameters, ValuesOfOneRankOnlyAreTold) {
  for (const bool averager : {true, false}) {
    for (const PutIn put_in : kPutIn) {
      run_group(2, [&](ProcessGroup group) {
        const auto net = filled(1);
        std::optional<DistributedDataParallel<std::shared_ptr<Net>>> ddp;
        std::optional<GradientAverager> averages;
        averager ? static_cast<void>(averages.emplace(*net, group))
                 : static_cast<void>(ddp.emplace(net, group));
        if (group.rank() == 0) put_in(net);
        const at::Tensor x = values({4, 6}, 1);
        EXPECT_THROW((averager ? net->forward(x) : ddp->forward(x)).sum().backward(), CommError);
      });
    }
  }
}

TEST_P(ChangedParameters, LayersMayBeFrozenAndUnfrozenUnderDdp) {
  for (const bool begins_frozen : {false, true}) {
    for (const DdpOptions& options : all_options()) {
      run_group(2, [&](ProcessGroup group) {
        const auto net = filled(1);
        const auto freeze = [&](bool on) {
          for (at::Tensor& parameter : net->first->parameters()) parameter.requires_grad_(!on);
        };
        freeze(begins_frozen);
        DistributedDataParallel ddp(net, group, options);
        for (int number = 0; number < 9; ++number) {
          if (number % 3 == 0) freeze(begins_frozen == (number % 2 == 0));
          step(*net, group, number, ddp);
        }
        EXPECT_EQ(ddp.statistics().parameters, begins_frozen ? 18 : 53);
      });
    }
  }
}

TEST_P(ChangedParameters, AModuleMayBeFrozenForAForward) {
  for (const DdpOptions& options : all_options()) {
    run_group(2, [&](ProcessGroup group) {
      const auto net = filled(1);
      DistributedDataParallel ddp(net, group, options);
      for (int number = 0; number < 4; ++number) {
        step(*net, group, number, ddp);
        for (at::Tensor& parameter : net->parameters()) parameter.requires_grad_(false);
        const at::Tensor x = values({4, 6}, group.rank()).requires_grad_();
        ddp(x).sum().backward();
        EXPECT_TRUE(x.grad().defined());
        for (at::Tensor& parameter : net->parameters()) parameter.requires_grad_(true);
      }
    });
  }
}

TEST_P(ChangedParameters, AnAveragerRefusesFrozenAndUnfrozenLayersByName) {
  for (const bool begins_frozen : {false, true}) {
    run_group(2, [&](ProcessGroup group) {
      const auto net = filled(1);
      net->first->bias.requires_grad_(!begins_frozen);
      GradientAverager averager(*net, group);
      step(*net, group, 0, *net);
      net->first->bias.requires_grad_(begins_frozen);
      EXPECT_THAT(message_of([&] {
                    net->forward(values({4, 6}, 1)).sum().backward();
                  }),
                  AllOf(HasSubstr("GradientAverager, rank " + std::to_string(group.rank())),
                        HasSubstr("parameter first.bias")));
    });
  }
}

TEST_P(ChangedParameters, RanksThatFreezeDifferentLayersAreTold) {
  for (const bool both : {true, false}) {
    run_group(2, [&](ProcessGroup group) {
      const auto net = filled(1);
      DistributedDataParallel ddp(net, group);
      step(*net, group, 0, ddp);
      if (group.rank() == 0) net->first->bias.requires_grad_(false);
      if (group.rank() == 1 && both) net->second->bias.requires_grad_(false);
      EXPECT_THROW(ddp(values({4, 6}, 1)).sum().backward(), CommError);
    });
  }
}

TEST_P(ChangedParameters, ALayerThatIsAddedIsAnError) {
  run_group(2, [](const ProcessGroup& group) {
    const auto net = filled(1);
    DistributedDataParallel ddp(net, group);
    net->register_parameter("late", at::ones({2}));
    EXPECT_THROW(ddp.forward(values({4, 6}, group.rank())), UsageError);
  });
}

}  // namespace changed_parameters_test
}  // namespace lockstep
