// The reducer of DistributedDataParallel against c10d::Reducer: the same calls, the same bits.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/optim/sgd.h>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <limits>
#include <optional>
#include <type_traits>

#include "lockstep/autograd/backward.h"
#include "lockstep/base/error.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/scaled_copy.h"
#include "tests/support/ddp_test_modules.h"
#include "tests/support/over_backends.h"

namespace lockstep {
namespace bucket_reducer_test {

using ddp_test::fill;
using ddp_test::Lookup;
using ddp_test::Net;
using ddp_test::values;
using ::testing::HasSubstr;

/// Layers of several sizes and strides.
struct Wide : torch::nn::Module {
  explicit Wide(at::ScalarType type = at::kFloat) {
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("linear", linear);
    to(type);
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
  }
  at::Tensor forward(const at::Tensor& x) {
    return linear(at::relu(norm(conv(x.view({-1, 3, 6, 6})))).flatten(1));
  }
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(3, 8, 3)};
  torch::nn::BatchNorm2d norm{8};
  torch::nn::Linear linear{8 * 4 * 4, 301};
};

struct Case {
  std::string backend;
  int ranks = 2;
  bool views = true;
  at::ScalarType type = at::kFloat;
  double cap_mb = 25;
  DdpOptions options = {};  ///< Beside those.
};

DdpOptions narrow() {
  return {.comm_hook = CommHook::fp16_compress};
}
DdpOptions unused() {
  return {.find_unused_parameters = true};
}
DdpOptions same_graph() {
  return {.static_graph = true};
}

// NOLINTNEXTLINE(readability-identifier-naming): GoogleTest looks for it.
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.backend << ", " << c.ranks << " ranks, " << (c.views ? "views, " : "copies, ")
       << c10::toString(c.type) << ", buckets of " << c.cap_mb << " MiB";
}

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& tensor : tensors) all.push_back(tensor.clone());
  return all;
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& parameter : parameters) all.push_back(parameter.grad());
  return all;
}

struct History {
  std::vector<at::Tensor> gradients;  ///< Of every step, one after the other.
  std::vector<at::Tensor> weights;
  std::vector<std::vector<int64_t>> buckets;
};

at::Tensor batch_of(const Case& c, int rank, int batch) {
  return values({5, 108}, 10 * rank + batch).to(c.type);
}

/// The mean over ranks of what their backwards over these batches give, made by a module without
/// DistributedDataParallel.
std::vector<at::Tensor> mean_gradients(const Case& c, const Wide& like,
                                       const std::vector<int>& batches) {
  Wide net(c.type);
  const auto parameters = net.parameters();
  {
    const c10::AutoGradMode no_grad(false);
    const auto wanted = like.parameters();
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i].data().copy_(wanted[i]);
  }
  for (int rank = 0; rank < c.ranks; ++rank) {
    for (const int batch : batches)
      net.forward(batch_of(c, rank, batch)).square().mean().backward();
  }
  std::vector<at::Tensor> mean;
  for (const at::Tensor& parameter : parameters) mean.push_back(parameter.grad() / c.ranks);
  return mean;
}

void expect_close(const Case& c, const at::Tensor& found, const at::Tensor& wanted) {
  const bool is_narrow = c.options.comm_hook != CommHook::none;
  const double rounding = c.type == at::kBFloat16 ? 0.03 : is_narrow ? 0.002 : 1e-5;
  const auto largest = wanted.abs().max().item<double>();
  EXPECT_LE((found - wanted).abs().max().item<double>(),
            rounding * std::max(largest, is_narrow ? 1e-4 : 1e-6));
}

/// The constructor has grown: some releases of LibTorch want the caps of single buckets at the end.
template <class Native, class... Args>
std::shared_ptr<Native> construct(Args&&... args) {
  if constexpr (std::is_constructible_v<Native, Args...>) {
    return std::make_shared<Native>(std::forward<Args>(args)...);
  } else {
    return std::make_shared<Native>(std::forward<Args>(args)..., std::vector<int64_t>{});
  }
}

/// What Python's DistributedDataParallel does around a forward with LibTorch's own reducer.
class Native {
 public:
  Native(std::shared_ptr<Wide> net, const ProcessGroup& group, const DdpOptions& options)
      : net_(std::move(net)), unused_(options.find_unused_parameters) {
    const auto bytes = [](double mb) { return static_cast<int64_t>(mb * 1024 * 1024); };
    std::vector<at::Tensor> parameters = net_->parameters();
    const std::vector<bool> sparse(parameters.size());
    const int64_t cap = bytes(options.bucket_cap_mb), first = bytes(options.first_bucket_mb);
    std::vector<size_t> limits{static_cast<size_t>(std::numeric_limits<int64_t>::max())};
    if (unused_) limits = {static_cast<size_t>(first), static_cast<size_t>(cap)};
    auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(parameters, limits, sparse));
    std::reverse(buckets.begin(), buckets.end());
    const std::unordered_map<size_t, std::string> names;
    reducer_ = construct<c10d::Reducer>(
        std::move(parameters), std::move(buckets),
        c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(&group.native()),
        sparse, cap, bool(unused_), bool(options.gradient_as_bucket_view), names, first, false,
        false);
    reducer_->set_logger(std::make_shared<c10d::Logger>(reducer_));
    if (options.comm_hook == CommHook::fp16_compress)
      reducer_->register_builtin_comm_hook(c10d::BuiltinCommHookType::FP16_COMPRESS);
    if (options.static_graph) reducer_->set_static_graph();
    delays_ = options.static_graph;
  }

  at::Tensor forward(const at::Tensor& x, bool synchronizing) {
    if (synchronizing) reducer_->prepare_for_forward();
    reducer_->rebuild_buckets();
    at::Tensor output = net_->forward(x);
    if (synchronizing)
      reducer_->prepare_for_backward(unused_ ? std::vector<at::Tensor>{output}
                                             : std::vector<at::Tensor>{});
    return output;
  }
  void end_backward() {
    if (std::exchange(delays_, false)) reducer_->delay_all_reduce();
  }
  std::vector<int64_t> bucket_bytes() const {
    std::vector<int64_t> bytes;
    for (const auto& bucket : reducer_->get_grad_buckets(false))
      bytes.push_back(static_cast<int64_t>(bucket.getBuffer().nbytes()));
    return bytes;
  }

 private:
  std::shared_ptr<Wide> net_;
  bool unused_, delays_ = false;
  std::shared_ptr<c10d::Reducer> reducer_;
};

/// What rank 0 sees of some steps: with gradients dropped, gathered over two backwards, kept from
/// the step before, and zeroed in place. `walk`: by our own backward, where it can.
History train(const Case& c, bool ours, bool walk) {
  History history;
  test::run_group(
      c.ranks,
      [&](ProcessGroup group) {
        auto net = std::make_shared<Wide>(c.type);
        fill(*net, 1);
        DdpOptions options = c.options;
        options.gradient_as_bucket_view = c.views;
        options.bucket_cap_mb = c.cap_mb;
        options.first_bucket_mb = c.cap_mb / 2;
        options.broadcast_buffers = false;
        std::optional<DistributedDataParallel<std::shared_ptr<Wide>>> ddp;
        std::optional<Native> native;
        ours ? static_cast<void>(ddp.emplace(net, group, options))
             : static_cast<void>(native.emplace(net, group, options));
        const auto parameters = net->parameters();
        auto sgd = make_optimizer("sgd", parameters, {.lr = 0.01, .momentum = 0.9});
        const auto backward = [&](int step, bool averages = true) {
          bool other = true;
          const NoSync local = ours && !averages ? ddp->no_sync() : NoSync(other);
          const at::Tensor x = batch_of(c, group.rank(), step);
          const at::Tensor y = ours ? (*ddp)(x) : native->forward(x, averages);
          const at::Tensor loss = y.square().mean();
          EXPECT_EQ(walks_backward(loss), ours);
          walk ? lockstep::backward(loss) : loss.backward();
          if (native && averages) native->end_backward();
        };
        for (int step = 0; step < 8; ++step) {
          if (step == 4) {
            for (const auto& parameter : parameters) parameter.grad().zero_();
          } else if (step != 3) {
            zero_grad(parameters);
          }
          // Step 3 adds to the gradients of the one before.
          const auto before =
              step == 3 ? copies(gradients_of(parameters)) : std::vector<at::Tensor>();
          std::vector<int> batches{step};
          if (step % 3 == 2) {
            batches.push_back(100 + step);
            backward(100 + step, /*averages=*/false);
          }
          backward(step);
          if (group.rank() == 0) {
            const auto mean = mean_gradients(c, *net, batches);
            for (size_t i = 0; i < mean.size(); ++i) {
              expect_close(c, parameters[i].grad(), before.empty() ? mean[i] : before[i] + mean[i]);
            }
          }
          sgd->step();
          if (group.rank() != 0) continue;
          for (const auto& parameter : parameters)
            history.gradients.push_back(parameter.grad().clone());
          history.buckets.push_back(ours ? ddp->statistics().bucket_bytes : native->bucket_bytes());
        }
        if (group.rank() == 0) history.weights = copies(parameters);
      },
      {.backend = c.backend});
  return history;
}

class BucketReducer : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(All, BucketReducer,
                         ::testing::Values(Case{"gloo"}, Case{"shm"}, Case{"gloo", 3},
                                           Case{"shm", 3, false}, Case{"gloo", 2, false},
                                           Case{"shm", 2, true, at::kDouble, 0.02},
                                           Case{"shm", 3, true, at::kBFloat16, 0.02},
                                           Case{"gloo", 3, true, at::kFloat, 0.02},
                                           Case{"shm", 4, false, at::kFloat, 0.0001},
                                           Case{"gloo", 3, true, at::kFloat, 0.02, narrow()},
                                           Case{"gloo", 3, false, at::kFloat, 0.02, unused()},
                                           Case{"gloo", 3, true, at::kFloat, 0.02, same_graph()}));

void expect_alike(const History& ours, const History& theirs) {
  ASSERT_EQ(ours.gradients.size(), theirs.gradients.size());
  for (size_t i = 0; i < ours.gradients.size(); ++i) {
    EXPECT_TRUE(at::equal(ours.gradients[i], theirs.gradients[i])) << i;
    EXPECT_EQ(ours.gradients[i].strides(), theirs.gradients[i].strides()) << i;
  }
  for (size_t i = 0; i < ours.weights.size(); ++i)
    EXPECT_TRUE(at::equal(ours.weights[i], theirs.weights[i])) << i;
  EXPECT_EQ(ours.buckets, theirs.buckets);
}

TEST_P(BucketReducer, GivesTheBitsOfTheOtherOne) {
  expect_alike(train(GetParam(), true, false), train(GetParam(), false, false));
}

TEST_P(BucketReducer, GivesTheSameBitsInOurOwnBackward) {
  expect_alike(train(GetParam(), true, true), train(GetParam(), false, true));
}

class BucketReducers : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, BucketReducers, test::over_backends(), test::backend_name);

TEST_P(BucketReducers, AParameterThatComesTwiceIsNamed) {
  run_group(2, [&](ProcessGroup group) {
    auto net = std::make_shared<Net>();
    fill(*net, 1);
    DistributedDataParallel ddp(net, group);
    // The first backward does not reach one layer; the second, of the same forward, runs into the
    // other again.
    const at::Tensor hidden = ddp.module().first(values({4, 6}, 0));
    ddp(values({4, 6}, 1));
    hidden.sum().backward();
    try {
      ddp.module().first(values({4, 6}, 2)).sum().backward();
      ADD_FAILURE() << "accepted";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("first."));
      EXPECT_THAT(error.what(), HasSubstr("twice"));
    }
  });
}

TEST_P(BucketReducers, GradientsOutliveTheWrapperAndTheGroup) {
  std::vector<std::shared_ptr<Net>> nets(2);
  run_group(2, [&](ProcessGroup group) {
    auto net = std::make_shared<Net>();
    fill(*net, 1);
    DistributedDataParallel ddp(net, group);
    ddp(values({4, 6}, group.rank())).sum().backward();
    nets[static_cast<size_t>(group.rank())] = net;
  });
  EXPECT_TRUE(at::equal(nets[0]->first->weight.grad(), nets[1]->first->weight.grad()));
  nets[0]->first->weight.grad().zero_();
  EXPECT_FALSE(at::equal(nets[0]->first->weight.grad(), nets[1]->first->weight.grad()));
  // Once the wrapper is gone, backward only adds up.
  nets[0]->forward(values({4, 6}, 3)).sum().backward();
}

TEST_P(BucketReducers, OptimizersOfTorchMayZeroTheViews) {
  run_group(2, [&](ProcessGroup group) {
    auto net = std::make_shared<Net>();
    DistributedDataParallel ddp(net, group);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    for (const bool to_none : {false, true, false}) {
      ddp(values({4, 6}, group.rank())).sum().backward();
      sgd.step();
      sgd.zero_grad(to_none);
      EXPECT_EQ(net->first->weight.grad().defined(), !to_none);
    }
  });
}

TEST_P(BucketReducers, AGraphOfGradientsIsNotAveragedButTheGradientsAre) {
  std::vector<at::Tensor> mean;
  for (int rank = 0; rank < 2; ++rank) {
    Net net;
    fill(net, 1);
    net.forward(values({4, 6}, rank)).square().sum().backward();
    for (const at::Tensor& gradient : gradients_of(net.parameters())) mean.push_back(gradient / 2);
  }
  const size_t count = mean.size() / 2;
  for (size_t i = 0; i < count; ++i) mean[i] += mean[count + i];
  run_group(2, [&](ProcessGroup group) {
    auto net = std::make_shared<Net>();
    fill(*net, 1);
    DistributedDataParallel ddp(net, group);
    const at::Tensor loss = ddp(values({4, 6}, group.rank())).square().sum();
    loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    auto parameters = net->parameters();
    for (size_t i = 0; i < count; ++i) {
      EXPECT_TRUE(at::allclose(parameters[i].grad(), mean[i])) << i;
      parameters[i].mutable_grad().reset();
    }
  });
}

TEST(ScaledCopy, HasTheBitsOfMul) {
  at::manual_seed(7);
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const int ranks : {2, 3, 5, 7}) {
      for (const int64_t count : {0, 1, 7, 33, 40'000}) {
        const at::Tensor source = at::randn({count}).to(type);
        at::Tensor target = at::empty_like(source);
        detail::scaled_copy(target, source, 1.0 / ranks);
        EXPECT_TRUE(at::equal(target, source.mul(1.0 / ranks))) << type << " " << count;
      }
    }
  }
  const at::Tensor source = at::randn({5, 9}).t();
  at::Tensor target = at::empty({9, 5});
  detail::scaled_copy(target, source, 1.0 / 3);
  EXPECT_TRUE(at::equal(target, source.mul(1.0 / 3)));
}

// Their memory holds other values than they have, or there is none.
TEST(ScaledCopy, TakesTensorsThatAreNegatedLazilyAndZerosWithoutMemory) {
  const at::Tensor values = at::arange(9, at::kFloat);
  at::Tensor target = at::empty({9});
  detail::scaled_copy(target, at::_neg_view(-values), 0.5);
  EXPECT_TRUE(at::equal(target, values * 0.5)) << target;
  at::Tensor negated = at::_neg_view(at::empty({9}));
  detail::scaled_copy(negated, values, 0.5);
  EXPECT_TRUE(at::equal(negated.clone(), values * 0.5)) << negated;
  detail::scaled_copy(target, at::_efficientzerotensor({9}, at::kFloat), 0.5);
  EXPECT_TRUE(at::equal(target, at::zeros({9}))) << target;
}

}  // namespace bucket_reducer_test
}  // namespace lockstep
