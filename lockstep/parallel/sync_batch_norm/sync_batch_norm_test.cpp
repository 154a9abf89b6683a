#include "lockstep/parallel/sync_batch_norm/sync_batch_norm.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>

#include <map>
#include <vector>

#include "lockstep/autograd/activation_checkpoint.h"
#include "lockstep/autograd/backward.h"
#include "lockstep/base/error.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/join.h"
#include "tests/support/ddp_test_modules.h"
#include "tests/support/over_backends.h"

namespace lockstep {
namespace sync_batch_norm_test {

namespace nn = torch::nn;
using ddp_test::fill;
using ddp_test::values;
using ::testing::HasSubstr;

class SyncBatchNorms : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(Over, SyncBatchNorms, test::over_backends(), test::backend_name);

/// Float32 sums over other parts of the same values.
bool near(const at::Tensor& a, const at::Tensor& b) {
  return at::allclose(a, b, 1e-4, 1e-5);
}

struct Result {
  at::Tensor y, dx, weight_gradient, bias_gradient, mean, variance;
};

template <class Norm>
Result train(Norm norm, const at::Tensor& x, const at::Tensor& dy, const at::Tensor& also = {}) {
  const c10::AutoGradMode gradients(true);
  fill(*norm, 1);
  if (also.defined()) norm->forward(also);
  const at::Tensor input = x.clone().requires_grad_();
  const at::Tensor y = norm->forward(input);
  backward((y * dy).sum());
  return {y.detach(),        input.grad(),       norm->weight.grad(),
          norm->bias.grad(), norm->running_mean, norm->running_var};
}

/// This rank's rows of a batch that the ranks have together.
at::Tensor own_rows(const at::Tensor& all, const std::vector<int64_t>& rows, int rank) {
  int64_t first = 0;
  for (int i = 0; i < rank; ++i) first += rows[static_cast<size_t>(i)];
  return all.narrow(0, first, rows[static_cast<size_t>(rank)]);
}

TEST_P(SyncBatchNorms, EqualPlainOnesOverTheJoinedBatch) {
  const std::vector<std::vector<int64_t>> cases{{4, 4}, {5, 2, 1}, {3, 0}, {1, 1, 1, 1}};
  for (const auto& rows : cases) {
    int64_t total = 0;
    for (const int64_t count : rows) total += count;
    const at::Tensor x = values({total, 4, 3, 2}, 1) * 3 + 5, dy = values({total, 4, 3, 2}, 2);
    const Result expected = train(nn::BatchNorm2d(4), x, dy);
    run_group(static_cast<int>(rows.size()), [&](const ProcessGroup& group) {
      for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
        const auto own = [&](const at::Tensor& all) { return own_rows(all, rows, group.rank()); };
        const Result got =
            train(SyncBatchNorm(4, group), own(x).contiguous(format), own(dy).contiguous(format));
        EXPECT_TRUE(near(got.y, own(expected.y)));
        EXPECT_TRUE(near(got.dx, own(expected.dx)));
        EXPECT_TRUE(near(got.mean, expected.mean));
        EXPECT_TRUE(near(got.variance, expected.variance));
        at::Tensor weight = got.weight_gradient, bias = got.bias_gradient;
        group.all_reduce(weight);
        group.all_reduce(bias);
        EXPECT_TRUE(near(weight, expected.weight_gradient));
        EXPECT_TRUE(near(bias, expected.bias_gradient));
      }
    });
  }
}

TEST_P(SyncBatchNorms, OtherInputsAndOptions) {
  run_group(2, [](const ProcessGroup& group) {
    const std::vector<int64_t> rows{3, 2};
    const auto check = [&](const at::Tensor& x, const nn::BatchNormOptions& options, double most) {
      nn::BatchNorm1d plain(options);
      SyncBatchNorm sync(options, group);
      for (int step = 0; step < 2; ++step) {
        const at::Tensor own = own_rows(x, rows, group.rank());
        const at::Tensor expected = plain->forward(x);
        EXPECT_TRUE(
            at::allclose(sync->forward(own), own_rows(expected, rows, group.rank()), most, most));
      }
      const auto buffers = sync->buffers(), others = plain->buffers();
      ASSERT_EQ(buffers.size(), others.size());
      for (size_t i = 0; i < buffers.size(); ++i) EXPECT_TRUE(near(buffers[i], others[i])) << i;
    };
    const at::Tensor x = values({5, 3}, 4);
    check(x, nn::BatchNormOptions(3), 1e-4);
    check(values({5, 3, 4}, 4), nn::BatchNormOptions(3).affine(false), 1e-4);
    check(x, nn::BatchNormOptions(3).momentum(std::nullopt), 1e-4);
    check(x, nn::BatchNormOptions(3).track_running_stats(false), 1e-4);
    SyncBatchNorm wide(3, group);
    wide->to(at::kDouble);
    nn::BatchNorm1d plain(3);
    plain->to(at::kDouble);
    const at::Tensor d = x.to(at::kDouble);
    EXPECT_TRUE(at::allclose(wide->forward(own_rows(d, rows, group.rank())),
                             own_rows(plain->forward(d), rows, group.rank()), 1e-12, 1e-12));
  });
}

/// Moments are float32's or better: only inputs, weights and results are rounded.
TEST_P(SyncBatchNorms, TakeSixteenBits) {
  run_group(2, [](const ProcessGroup& group) {
    for (const auto dtype : {at::kBFloat16, at::kHalf}) {
      for (const bool weights_too : {false, true}) {
        const at::Tensor x = values({6, 3}, 4).to(dtype), dy = values({6, 3}, 5).to(dtype);
        const double most = dtype == at::kHalf ? 1e-2 : 5e-2;
        const auto as_asked = [&](auto norm) {
          norm->to(weights_too ? dtype : at::kFloat);
          return norm;
        };
        const Result expected = train(as_asked(nn::BatchNorm1d(3)), x, dy);
        const Result got =
            train(as_asked(SyncBatchNorm(3, group)), own_rows(x, {4, 2}, group.rank()),
                  own_rows(dy, {4, 2}, group.rank()));
        const auto equal = [&](const at::Tensor& a, const at::Tensor& b) {
          return a.scalar_type() == b.scalar_type() && at::allclose(a, b, most, most);
        };
        EXPECT_TRUE(equal(got.y, own_rows(expected.y, {4, 2}, group.rank())));
        EXPECT_TRUE(equal(got.dx, own_rows(expected.dx, {4, 2}, group.rank())));
        EXPECT_TRUE(equal(got.mean, expected.mean));
        EXPECT_TRUE(equal(got.variance, expected.variance));
        EXPECT_EQ(got.weight_gradient.scalar_type(), expected.weight_gradient.scalar_type());
      }
      SyncBatchNorm bare(nn::BatchNormOptions(3).affine(false).track_running_stats(false), group);
      EXPECT_EQ(bare->forward(values({4, 3}, group.rank()).to(dtype)).scalar_type(), dtype);
    }
  });
}

TEST_P(SyncBatchNorms, EvaluateByThemselves) {
  run_group(2, [](const ProcessGroup& group) {
    SyncBatchNorm norm(3, group);
    norm->eval();
    // Rank 1 does not call: nothing is communicated.
    if (group.rank() == 0) {
      nn::BatchNorm1d plain(3);
      plain->eval();
      const at::Tensor x = values({4, 3}, 1);
      EXPECT_TRUE(at::equal(norm->forward(x), plain->forward(x)));
    }
    EXPECT_EQ(norm->named_buffers().keys(),
              (std::vector<std::string>{"running_mean", "running_var", "num_batches_tracked"}));
  });
}

/// A module whose batch norms nobody can exchange from outside: members, and a function.
struct Mixed : nn::Module {
  Mixed() {
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("linear", linear);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = at::relu(norm(conv(x))).flatten(1);
    return linear(at::batch_norm(h, {}, {}, {}, {}, /*training=*/true, 0.1, 1e-5, false));
  }
  nn::Conv2d conv{nn::Conv2dOptions(2, 3, 3)};
  nn::BatchNorm2d norm{3};
  nn::Linear linear{3 * 2 * 2, 2};
};

TEST_P(SyncBatchNorms, ConvertedModulesTrainAsOneOnTheJoinedBatch) {
  const at::Tensor x = values({12, 2, 4, 4}, 1);
  auto alone = std::make_shared<Mixed>();
  fill(*alone, 0);
  alone->forward(x).square().mean().backward();
  run_group(3, [&](const ProcessGroup& group) {
    const c10::AutoGradMode gradients(true);
    auto net = std::make_shared<Mixed>();
    fill(*net, 0);
    DistributedDataParallel ddp(convert_sync_batchnorm(net, group), group);
    backward(ddp.forward(x.narrow(0, 4 * group.rank(), 4)).square().mean());
    const auto own = net->named_parameters(), expected = alone->named_parameters();
    for (const auto& item : own) {
      EXPECT_TRUE(near(item.value().grad(), expected[item.key()].grad())) << item.key();
    }
    EXPECT_TRUE(near(net->norm->running_var, alone->norm->running_var));
    ddp.eval();
    EXPECT_FALSE(net->norm->is_training());
    ddp.train();
    EXPECT_TRUE(net->norm->is_training());
    // Outside of forward nothing is synchronised: rank 0 may call alone.
    if (group.rank() == 0) net->forward(x);
    net->eval();
    auto converted = convert_sync_batchnorm(net, group);
    EXPECT_FALSE(converted->is_training());
    EXPECT_EQ(converted.ptr(), net);
    if (group.rank() == 0) converted.forward(x);
  });
}

/// Backward makes the activations anew, when forward's guard is long gone.
TEST_P(SyncBatchNorms, CheckpointedOnesAreSynchronisedInTheSecondRunToo) {
  run_group(2, [](const ProcessGroup& group) {
    const c10::AutoGradMode gradients(true);
    const auto gradients_of = [&](bool checkpointed) {
      nn::BatchNorm1d norm(3);
      fill(*norm, 1);
      const auto run = [&norm](const at::Tensor& in) { return at::tanh(norm(in)); };
      const at::Tensor x = (values({4, 3}, group.rank()) + group.rank()).requires_grad_();
      at::Tensor y;
      {
        const SyncBatchNormGuard guard(group);
        y = checkpointed ? checkpoint(run, x) : run(x);
      }
      backward((y * values({4, 3}, 7)).sum());
      return std::vector<at::Tensor>{x.grad(), norm->weight.grad(), norm->bias.grad()};
    };
    const auto expected = gradients_of(false), got = gradients_of(true);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
  });
}

/// LibTorch's instance norm calls batch norm.
TEST_P(SyncBatchNorms, LeaveInstanceNormsAlone) {
  run_group(2, [](const ProcessGroup& group) {
    const c10::AutoGradMode gradients(true);
    const auto run = [&](bool guarded) {
      nn::InstanceNorm2d norm(nn::InstanceNorm2dOptions(3).affine(true).track_running_stats(true));
      fill(*norm, 1);
      const at::Tensor x = (values({2, 3, 4, 4}, group.rank()) + group.rank()).requires_grad_();
      at::Tensor y;
      {
        const SyncBatchNormGuard guard(guarded ? group : ProcessGroup());
        y = norm(x);
        if (guarded) {  // The guard holds on.
          const at::Tensor rows = values({4, 3}, group.rank());
          EXPECT_FALSE(
              near(at::batch_norm(rows, {}, {}, {}, {}, true, 0.1, 1e-5, false),
                   std::get<0>(at::native_batch_norm(rows, {}, {}, {}, {}, true, 0.1, 1e-5))));
        }
      }
      backward((y * values({2, 3, 4, 4}, 7)).sum());
      return std::vector<at::Tensor>{y.detach(), x.grad(), norm->weight.grad(), norm->running_mean,
                                     norm->running_var};
    };
    const auto expected = run(false), got = run(true);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
  });
}

TEST_P(SyncBatchNorms, GuardsNest) {
  run_group(2, [](const ProcessGroup& group) {
    const at::Tensor x = values({4, 3}, group.rank());
    const auto run = [&] {
      return at::batch_norm(x, {}, {}, {}, {}, /*training=*/true, 0.1, 1e-5, false);
    };
    const at::Tensor plain = run();
    {
      const SyncBatchNormGuard outer(group);
      const at::Tensor synced = run();
      EXPECT_FALSE(near(synced, plain));
      {
        const SyncBatchNormGuard inner(group);
        EXPECT_TRUE(at::equal(run(), synced));
      }
      EXPECT_TRUE(at::equal(run(), synced));
      const SyncBatchNormGuard nothing{ProcessGroup()};
    }
    EXPECT_TRUE(at::equal(run(), plain));
  });
}

TEST(SyncBatchNormModule, WrongUse) {
  test::run_group(
      2,
      [](const ProcessGroup& group) {
        const auto refused = [](SyncBatchNorm norm, const at::Tensor& x) {
          try {
            norm->forward(x);
          } catch (const UsageError& error) {
            return std::string(error.what());
          }
          return std::string("no UsageError");
        };
        EXPECT_THAT(refused(SyncBatchNorm(3, group), at::ones({4})), HasSubstr("expected [N, 3"));
        EXPECT_THAT(refused(SyncBatchNorm(3, group), at::ones({4, 2})), HasSubstr("shape [4, 2]"));
        EXPECT_THAT(refused(SyncBatchNorm(3, group), at::ones({group.rank(), 3})),
                    HasSubstr("got 1 over all ranks"));
      },
      {.backend = "shm"});
}

}  // namespace sync_batch_norm_test
}  // namespace lockstep
