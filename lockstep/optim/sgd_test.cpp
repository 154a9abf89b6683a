#include "lockstep/optim/sgd.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <cstring>

#include "lockstep/base/error.h"

namespace lockstep {
namespace sgd_test {

/// torch.optim.SGD as Python writes it: one operation after the other.
class PlainSgd {
 public:
  PlainSgd(std::vector<at::Tensor> parameters, const OptimizerOptions& options)
      : parameters_(std::move(parameters)), buffers_(parameters_.size()), options_(options) {}

  void step() {
    const c10::AutoGradMode no_grad(false);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      at::Tensor g = parameters_[i].grad();
      if (!g.defined()) continue;
      const double decay = options_.weight_decay.value_or(0), momentum = options_.momentum;
      if (decay != 0) g = g.add(parameters_[i], decay);
      if (momentum != 0) {
        if (!buffers_[i].defined()) {
          buffers_[i] = g.clone();
        } else {
          buffers_[i]
              .mul_(at::native::wrapped_scalar_tensor(momentum))
              .add_(g, 1 - options_.dampening);
        }
        g = options_.nesterov ? g.add(buffers_[i], momentum) : buffers_[i];
      }
      parameters_[i].add_(g, -options_.lr);
    }
  }

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> buffers_;
  OptimizerOptions options_;
};

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.detach().contiguous(), y = b.detach().contiguous();
  return x.sizes() == y.sizes() && x.dtype() == y.dtype() &&
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

std::vector<at::Tensor> leaves(const std::vector<at::Tensor>& values) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& value : values) all.push_back(value.clone().requires_grad_());
  return all;
}

void set_gradients(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    a[i].mutable_grad() = at::randn(a[i].sizes(), a[i].options().requires_grad(false));
    b[i].mutable_grad() = a[i].grad().clone();
  }
}

void expect_same_steps(const std::vector<at::Tensor>& start, const OptimizerOptions& options,
                       int steps = 5) {
  auto ours = leaves(start), plain = leaves(start);
  Sgd sgd(ours, options);
  PlainSgd reference(plain, options);
  for (int step = 0; step < steps; ++step) {
    set_gradients(ours, plain);
    sgd.step();
    reference.step();
    for (size_t i = 0; i < ours.size(); ++i) {
      ASSERT_TRUE(same_bits(ours[i], plain[i]))
          << "step " << step << ", tensor of " << ours[i].numel() << " elements";
    }
  }
}

std::vector<OptimizerOptions> variants() {
  std::vector<OptimizerOptions> all(7);
  for (OptimizerOptions& options : all) options.lr = 0.0123;
  all[1].weight_decay = 0.01;
  all[2].momentum = 0.9;
  all[3].momentum = 0.9;
  all[3].nesterov = true;
  all[4].momentum = 0.9;
  all[4].dampening = 0.3;
  all[5].momentum = 0.9;
  all[5].weight_decay = 0.01;
  all[6].momentum = 0.5;
  all[6].nesterov = true;
  all[6].weight_decay = 0.3;
  return all;
}

TEST(Sgd, HasTheBitsOfPlainOperationsForEverySize) {
  at::manual_seed(1);
  std::vector<at::Tensor> start;
  for (int64_t size = 1; size <= 130; ++size) start.push_back(at::randn({size}));
  start.push_back(at::randn({128, 784}));
  start.push_back(at::randn({40003}));
  for (const OptimizerOptions& options : variants()) {
    SCOPED_TRACE(testing::Message() << "momentum " << options.momentum << " dampening "
                                    << options.dampening << " nesterov " << options.nesterov
                                    << " decay " << options.weight_decay.value_or(0));
    expect_same_steps(start, options);
  }
}

TEST(Sgd, HasTheBitsOfPlainOperationsOnSeveralThreads) {
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  at::manual_seed(2);
  expect_same_steps({at::randn({128, 785}), at::randn({33})}, variants()[5]);
  at::set_num_threads(before);
}

TEST(Sgd, FindsOutHowThisProcessorRounds) {
  OptimizerOptions options;
  options.momentum = 0.9;
  const Sgd sgd({at::zeros({1}).requires_grad_()}, options);
  EXPECT_NE(sgd.rounding(), Sgd::Rounding::unknown)
      << "steps are right but slow: the fused kernel's bits differ from the plain operations'";
}

TEST(Sgd, TakesTensorsThatCannotBeFused) {
  at::manual_seed(3);
  const auto strided = at::randn({8, 12}).t();
  ASSERT_FALSE(strided.is_contiguous());
  at::Tensor ours = strided.detach().requires_grad_(), plain = strided.clone();
  plain = plain.detach().requires_grad_();
  Sgd sgd({ours}, variants()[5]);
  PlainSgd reference({plain}, variants()[5]);
  for (int step = 0; step < 3; ++step) {
    set_gradients({ours}, {plain});
    sgd.step();
    reference.step();
    EXPECT_TRUE(same_bits(ours, plain));
  }
  expect_same_steps({at::randn({100}, at::kDouble), at::randn({100}).to(at::kBFloat16)},
                    variants()[2]);
}

TEST(Sgd, TakesGradientsWhoseMemoryDoesNotHoldTheirValues) {
  const at::Tensor start = at::ones({100}), values = at::arange(100, at::kFloat);
  const std::vector<at::Tensor> gradients = {at::_neg_view(-values),
                                             at::_efficientzerotensor({100}, at::kFloat)};
  for (const auto& gradient : gradients) {
    at::Tensor ours = start.clone().requires_grad_(), plain = start.clone().requires_grad_();
    ours.mutable_grad() = gradient;
    plain.mutable_grad() = gradient.clone();
    Sgd({ours}, {.lr = 0.5}).step();
    Sgd({plain}, {.lr = 0.5}).step();
    EXPECT_TRUE(same_bits(ours, plain)) << ours;
  }
}

TEST(Sgd, MemoryOrderChangesNoBit) {
  at::manual_seed(5);
  for (const auto& shape : {std::vector<int64_t>{8, 3, 5, 5}, {8, 4, 4, 4}, {2, 3, 1, 3}}) {
    const at::Tensor start = at::randn(shape);
    auto plain = start.clone().requires_grad_();
    auto last = start.contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
    ASSERT_FALSE(last.is_contiguous());
    Sgd a({plain}, variants()[5]), b({last}, variants()[5]);
    for (int step = 0; step < 4; ++step) {
      plain.mutable_grad() = at::randn(start.sizes());
      last.mutable_grad() = plain.grad().contiguous(at::MemoryFormat::ChannelsLast);
      a.step();
      b.step();
      ASSERT_TRUE(same_bits(plain, last)) << "step " << step;
    }
  }
}

TEST(Sgd, TakesSparseGradients) {
  at::Tensor table = at::ones({4, 2}).requires_grad_();
  OptimizerOptions options;
  options.lr = 0.5;
  Sgd sgd({table}, options);
  table.mutable_grad() =
      at::sparse_coo_tensor(at::tensor({1, 3}, at::kLong).view({1, 2}), at::ones({2, 2}), {4, 2});
  sgd.step();
  const at::Tensor expected = at::tensor({1.0f, 1.0f, 0.5f, 0.5f, 1.0f, 1.0f, 0.5f, 0.5f});
  EXPECT_TRUE(at::equal(table.detach().flatten(), expected));
}

TEST(Sgd, LeavesParametersWithoutGradientAlone) {
  at::Tensor a = at::ones({40}).requires_grad_(), b = at::ones({40}).requires_grad_();
  OptimizerOptions options;
  options.momentum = 0.9;
  Sgd sgd({a, b}, options);
  for (int step = 0; step < 3; ++step) {
    a.mutable_grad() = at::ones({40});
    sgd.step();
  }
  EXPECT_LT(a[0].item<float>(), 1);
  EXPECT_TRUE(at::equal(b.detach(), at::ones({40})));
  ASSERT_EQ(sgd.state().size(), 1u);
  EXPECT_EQ(sgd.state()[0].first, "momentum_buffer.0");
}

TEST(Sgd, AutogradNoticesAStepBetweenForwardAndBackward) {
  for (const int64_t size : {5, 64, 70}) {
    at::Tensor p = at::ones({size}).requires_grad_();
    OptimizerOptions options;
    options.momentum = 0.9;
    Sgd sgd({p}, options);
    p.mutable_grad() = at::ones({size});
    sgd.step();  // The first step takes another way.
    const at::Tensor loss = (p * p).sum();
    p.mutable_grad() = at::ones({size});
    sgd.step();
    EXPECT_THROW(loss.backward(), c10::Error) << size;
  }
}

TEST(Sgd, StateGoesOnWithTheSameBits) {
  at::manual_seed(4);
  const std::vector<at::Tensor> start{at::randn({77}), at::randn({3, 3})};
  auto a = leaves(start), b = leaves(start);
  OptimizerOptions options = variants()[3];
  Sgd first(a, options);
  auto second = std::make_unique<Sgd>(b, options);
  for (int step = 0; step < 6; ++step) {
    if (step == 3) {
      auto fresh = std::make_unique<Sgd>(b, options);
      fresh->load_state(second->state());
      second = std::move(fresh);
    }
    set_gradients(a, b);
    first.step();
    second->step();
  }
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(same_bits(a[i], b[i]));
}

TEST(Sgd, LoadedStateIsACopy) {
  at::Tensor p = at::zeros({3}).requires_grad_();
  OptimizerOptions options;
  options.momentum = 0.9;
  Sgd sgd({p}, options);
  at::Tensor buffer = at::ones({3});
  sgd.load_state({{"momentum_buffer.0", buffer}});
  buffer.fill_(7);
  EXPECT_TRUE(at::equal(sgd.state()[0].second, at::ones({3})));
}

void expect_refused(const StateDict& state, const std::string& text) {
  OptimizerOptions options;
  options.momentum = 0.9;
  Sgd sgd({at::zeros({3}).requires_grad_()}, options);
  try {
    sgd.load_state(state);
    FAIL() << "accepted";
  } catch (const CheckpointError& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(Sgd, ForeignStateIsRefusedByName) {
  expect_refused({{"momentum_buffer.0", at::zeros({4})}}, "[4]");
  expect_refused({{"momentum_buffer.1", at::zeros({3})}}, "momentum_buffer.1");
  expect_refused({{"exp_avg.0", at::zeros({3})}}, "exp_avg.0");
  expect_refused({{"momentum_buffer.x", at::zeros({3})}}, "momentum_buffer.x");
  expect_refused({{"momentum_buffer", at::zeros({3})}}, "momentum_buffer");
}

}  // namespace sgd_test
}  // namespace lockstep
