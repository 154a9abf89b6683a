// Gradients that come in other ways than once in the one backward of each forward.
#include "lockstep/parallel/gradient_tracker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

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
namespace gradient_tracker_test {

using ddp_test::expect_gradients;
using ddp_test::fill;
using ddp_test::mean_gradients;
using ddp_test::Repeated;
using ddp_test::values;
using test::message_of;
using ::testing::HasSubstr;

using ddp_test::Tensors;

at::Tensor input(int rank, int step) {
  return values({4, 6}, 10 * rank + step);
}

/// Twice differentiable in all of its parameters.
struct Smooth : torch::nn::Module {
  Smooth() {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::tanh(first(x))); }
  torch::nn::Linear first{6, 5}, second{torch::nn::LinearOptions(5, 3).bias(false)};
};

DdpOptions with(bool views, bool static_graph = false, bool find_unused = false) {
  DdpOptions options;
  options.static_graph = static_graph;
  options.find_unused_parameters = find_unused;
  options.gradient_as_bucket_view = views;
  options.bucket_cap_mb = options.first_bucket_mb = 50.0 / (1024 * 1024);
  return options;
}

const std::vector<DdpOptions>& all_options() {
  static const std::vector<DdpOptions> all{with(/*views=*/true), with(false),
                                           with(true, /*static_graph=*/true), with(false, true),
                                           with(true, false, /*find_unused=*/true)};
  return all;
}

std::string name_of(const DdpOptions& options) {
  return std::string(options.gradient_as_bucket_view ? "views" : "copies") +
         (options.static_graph ? ", static" : "") +
         (options.find_unused_parameters ? ", unused" : "");
}

class Tracker : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, Tracker, test::over_backends(), test::backend_name);

TEST_P(Tracker, OnlyAStaticGraphTakesALayerThatIsCheckpointedTwice) {
  const auto is_refused = ::testing::AllOf(HasSubstr("block."), HasSubstr("static_graph"));
  run_group(2, [&](ProcessGroup group) {
    for (const bool views : {true, false}) {
      for (const bool outside : {false, true}) {
        for (const bool walks : {false, true}) {
          auto net = std::make_shared<Repeated>(), other = std::make_shared<Repeated>();
          net->outside = other->outside = outside;
          const auto run = [&](const at::Tensor& loss) {
            walks ? backward(loss) : loss.backward();
          };
          DistributedDataParallel ddp(net, group, with(views));
          EXPECT_THAT(message_of([&] { run(ddp(input(0, 0), 2).sum()); }), is_refused);
          GradientAverager averager(*other, group);
          EXPECT_THAT(message_of([&] { run(other->forward(input(0, 0), 2).sum()); }), is_refused);
        }
      }
    }
  });
  run_group(2, [&](ProcessGroup group) {
    auto net = std::make_shared<Repeated>();
    fill(*net, 1);
    DistributedDataParallel ddp(net, group, with(/*views=*/true, /*static_graph=*/true));
    for (int step = 0; step < 3; ++step) {
      const auto run = [&](auto& module, int rank) {
        module.forward(input(rank, step), 2).square().mean().backward();
      };
      const Tensors expected = mean_gradients<Repeated>(2, *net, run);
      zero_grad(net->parameters());
      run(ddp, group.rank());
      expect_gradients(*net, expected);
    }
  });
}

TEST_P(Tracker, SeveralForwardsThenSeveralBackwardsAreAveraged) {
  for (const DdpOptions& options : all_options()) {
    run_group(2, [&](ProcessGroup group) {
      SCOPED_TRACE(name_of(options));
      auto net = std::make_shared<Smooth>();
      fill(*net, 1);
      DistributedDataParallel ddp(net, group, options);
      for (int step = 0; step < 4; ++step) {
        const auto run = [&](auto& module, int rank) {
          const at::Tensor a = module.forward(input(rank, step)).square().mean();
          const at::Tensor b = module.forward(input(rank, step + 7)).abs().mean();
          a.backward();
          const at::Tensor c = module.forward(input(rank, step + 9)).square().mean();
          b.backward();
          c.backward();
        };
        const Tensors expected = mean_gradients<Smooth>(2, *net, run);
        zero_grad(net->parameters());
        run(ddp, group.rank());
        expect_gradients(*net, expected);
      }
    });
  }
}

TEST_P(Tracker, SeveralBackwardsOfOneForwardAreAveraged) {
  for (const DdpOptions& options : all_options()) {
    run_group(2, [&](ProcessGroup group) {
      SCOPED_TRACE(name_of(options));
      auto net = std::make_shared<Smooth>();
      fill(*net, 1);
      DistributedDataParallel ddp(net, group, options);
      for (int step = 0; step < 3; ++step) {
        const auto run = [&](auto& module, int rank) {
          const at::Tensor y = module.forward(input(rank, step));
          y.square().mean().backward({}, /*retain_graph=*/true);
          y.abs().mean().backward();
        };
        const Tensors expected = mean_gradients<Smooth>(2, *net, run);
        zero_grad(net->parameters());
        run(ddp, group.rank());
        expect_gradients(*net, expected);
      }
    });
  }
}

TEST_P(Tracker, AGradientPenaltyIsAveraged) {
  for (const bool alone : {true, false}) {
    for (const DdpOptions& options : all_options()) {
      run_group(2, [&](ProcessGroup group) {
        SCOPED_TRACE(name_of(options) + (alone ? ", alone" : ""));
        auto net = std::make_shared<Smooth>();
        fill(*net, 1);
        DistributedDataParallel ddp(net, group, options);
        for (int step = 0; step < 3; ++step) {
          const auto run = [&](auto& module, int rank) {
            const at::Tensor x = input(rank, step).requires_grad_();
            const at::Tensor y = module.forward(x);
            const at::Tensor slope =
                torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true,
                                      /*create_graph=*/true)[0];
            slope.square().sum().backward({}, /*retain_graph=*/!alone);
            if (!alone) y.square().mean().backward();
          };
          const Tensors expected = mean_gradients<Smooth>(2, *net, run);
          zero_grad(net->parameters());
          run(ddp, group.rank());
          expect_gradients(*net, expected);
        }
      });
    }
  }
}

/// Two tables of which the sum is used. The gradient of a sum is one tensor.
template <bool sparse>
struct Tables : torch::nn::Module {
  Tables() {
    register_module("token", token);
    register_module("position", position);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& tokens, bool with_positions) {
    const at::Tensor rows = token(tokens);
    return head(with_positions ? rows + position(at::arange(tokens.size(0))) : rows);
  }
  static torch::nn::Embedding table() {
    return torch::nn::Embedding(torch::nn::EmbeddingOptions(8, 3).sparse(sparse));
  }
  torch::nn::Embedding token = table(), position = table();
  torch::nn::Linear head{3, 1};
};

void expect_sparse_gradients(const ProcessGroup& group, const DdpOptions& options, bool averager,
                             bool misses) {
  auto net = std::make_shared<Tables<true>>();
  fill(*net, 1);
  std::optional<DistributedDataParallel<std::shared_ptr<Tables<true>>>> ddp;
  std::optional<GradientAverager> averages;
  averager ? static_cast<void>(averages.emplace(*net, group))
           : static_cast<void>(ddp.emplace(net, group, options));
  for (int step = 0; step < 4; ++step) {
    const auto run = [&](auto& module, int rank) {
      const at::Tensor tokens = at::tensor({1, rank + 3, 1, step}, at::kLong);
      module.forward(tokens, !misses || (step % 2 == 0 && !options.static_graph))
          .square()
          .sum()
          .backward();
    };
    auto expected = mean_gradients<Tables<false>>(2, *net, [&](auto& one, int rank) {
      for (const at::Tensor& parameter : one.parameters())
        parameter.mutable_grad() = at::zeros_like(parameter);
      run(one, rank);
    });
    zero_grad(net->parameters());
    averager ? run(*net, group.rank()) : run(*ddp, group.rank());
    for (at::Tensor& parameter : net->parameters()) {
      if (parameter.grad().defined()) parameter.mutable_grad() = parameter.grad().to_dense();
    }
    expect_gradients(*net, expected);
  }
}

TEST_P(Tracker, SparseGradientsThatShareTheirValuesAreAveraged) {
  DdpOptions options;
  run_group(2, [&](ProcessGroup group) { expect_sparse_gradients(group, options, true, false); });
  run_group(2, [&](ProcessGroup group) { expect_sparse_gradients(group, options, false, false); });
  for (const bool find_unused : {true, false}) {
    for (const bool misses : {false, true}) {
      options.find_unused_parameters = find_unused;
      options.static_graph = !find_unused;
      run_group(2, [&](ProcessGroup group) {
        SCOPED_TRACE(find_unused ? "find_unused_parameters" : "static_graph");
        expect_sparse_gradients(group, options, false, misses);
      });
    }
  }
}

/// A layer that is checkpointed more often in one step than in the one before.
TEST_P(Tracker, AStaticGraphThatChangesIsRefusedByName) {
  run_group(2, [&](ProcessGroup group) {
    auto net = std::make_shared<Repeated>();
    fill(*net, 1);
    DistributedDataParallel ddp(net, group, with(/*views=*/true, /*static_graph=*/true));
    for (int step = 0; step < 2; ++step) ddp(input(group.rank(), step), 2).sum().backward();
    EXPECT_THAT(message_of([&] { ddp(input(group.rank(), 2), 3).sum().backward(); }),
                ::testing::AllOf(HasSubstr("block."), HasSubstr("static_graph")));
  });
}

}  // namespace gradient_tracker_test
}  // namespace lockstep
