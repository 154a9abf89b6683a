#include "lockstep/autograd/backward.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>

#include "lockstep/autograd/backward_hook.h"

namespace lockstep {
namespace backward_test {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using Leaves = std::vector<at::Tensor>;
using Forward = std::function<at::Tensor(const Leaves&)>;

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  if (a.sizes() != b.sizes() || a.strides() != b.strides() || a.dtype() != b.dtype()) return false;
  const at::Tensor x = a.detach().contiguous(), y = b.detach().contiguous();
  return std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

Leaves leaves_of(const Leaves& values) {
  Leaves leaves;
  for (const at::Tensor& value : values)
    leaves.push_back(value.clone().requires_grad_(value.is_floating_point()));
  return leaves;
}

/// Notes when a leaf has its gradient.
class Arrival : public PlainPostHook {
 public:
  Arrival(std::vector<size_t>& order, size_t index) : order_(order), index_(index) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    order_.push_back(index_);
    return outputs;
  }

 private:
  std::vector<size_t>& order_;
  size_t index_;
};

struct Outcome {
  Leaves leaves;
  std::vector<size_t> order;
  bool walked = false;
};

/// Two backwards, so that the second adds to gradients that are there.
Outcome outcome_of(const Leaves& values, const Forward& forward, bool ours) {
  Outcome outcome;
  outcome.leaves = leaves_of(values);
  std::vector<decltype(torch::autograd::impl::grad_accumulator(values[0]))> held;
  for (size_t i = 0; i < values.size(); ++i) {
    if (!outcome.leaves[i].requires_grad()) continue;
    held.push_back(torch::autograd::impl::grad_accumulator(outcome.leaves[i]));
    held.back()->add_post_hook(std::make_unique<Arrival>(outcome.order, i));
  }
  for (int pass = 0; pass < 2; ++pass) {
    const at::Tensor loss = forward(outcome.leaves);
    outcome.walked = walks_backward(loss);
    ours ? backward(loss) : loss.backward();
  }
  return outcome;
}

void expect_alike(const Leaves& values, const Forward& forward) {
  const Outcome ours = outcome_of(values, forward, true);
  const Outcome theirs = outcome_of(values, forward, false);
  EXPECT_TRUE(ours.walked);
  EXPECT_EQ(ours.order, theirs.order);
  for (size_t i = 0; i < values.size(); ++i)
    EXPECT_TRUE(same_bits(ours.leaves[i].grad(), theirs.leaves[i].grad())) << "leaf " << i;
}

/// Doubles in backward; gives no gradient to its second input.
struct Doubling : Function<Doubling> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& a, const at::Tensor& b) {
    context->save_for_backward({a});
    return a + b;
  }
  static variable_list backward(AutogradContext*, variable_list gradients) {
    return {gradients[0] * 2, at::Tensor()};
  }
};

struct Failing : Function<Failing> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& a) { return a.clone(); }
  static variable_list backward(AutogradContext*, const variable_list&) {
    throw std::out_of_range("of its own");
  }
};

/// Gives its gradient in another dtype than its input has.
struct Widening : Function<Widening> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& a) { return a * 3; }
  static variable_list backward(AutogradContext*, variable_list gradients) {
    return {gradients[0].to(at::kDouble).mul(1.0 / 3)};
  }
};

/// Asks for a gradient within backward, as checkpointing does.
struct Nested : Function<Nested> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& a) {
    context->save_for_backward({a});
    return a.square();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::Tensor a = context->get_saved_variables()[0].detach().requires_grad_();
    {
      const c10::AutoGradMode grad(true);
      lockstep::backward(a.square(), gradients[0]);
    }
    return {a.grad()};
  }
};

TEST(Backward, LinearRegression) {
  at::manual_seed(1);
  expect_alike({at::rand({8, 20}), at::rand({1, 20}), at::rand({1}), at::rand({8, 1})},
               [](const Leaves& l) { return at::mse_loss(at::linear(l[0], l[1], l[2]), l[3]); });
}

TEST(Backward, Perceptron) {
  at::manual_seed(2);
  const at::Tensor target = at::randint(10, {16}, at::kLong);
  expect_alike({at::randn({16, 30}), at::randn({20, 30}), at::randn({20}), at::randn({10, 20}),
                at::randn({10})},
               [&](const Leaves& l) {
                 const at::Tensor hidden = at::relu(at::linear(l[0], l[1], l[2]));
                 return at::cross_entropy_loss(at::linear(hidden, l[3], l[4]), target);
               });
}

TEST(Backward, ConvolutionsOfBothLayouts) {
  at::manual_seed(3);
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    expect_alike(
        {at::randn({4, 3, 12, 12}).contiguous(format), at::randn({8, 3, 3, 3}).contiguous(format),
         at::randn({8}), at::rand({8}), at::rand({8})},
        [](const Leaves& l) {
          at::Tensor x = at::conv2d(l[0], l[1], l[2]);
          x = at::batch_norm(x, l[3], l[4], {}, {}, true, 0.1, 1e-5, false);
          return at::max_pool2d(at::relu(x), {2, 2}).mean();
        });
  }
}

TEST(Backward, SumsWhatWasBroadcastAndWhatIsUsedTwice) {
  at::manual_seed(4);
  expect_alike({at::randn({5, 7}), at::randn({7}), at::randn({1, 1})}, [](const Leaves& l) {
    const at::Tensor x = l[0] * l[1] + l[2];
    return (x * x + x.sum(0) * l[1]).sum();
  });
}

TEST(Backward, DtypesAndViews) {
  at::manual_seed(5);
  expect_alike({at::randn({6, 4}), at::randn({4, 3}, at::kDouble), at::randn({24}, at::kBFloat16)},
               [](const Leaves& l) {
                 const at::Tensor x = at::mm(l[0].to(at::kDouble), l[1]).t().narrow(0, 1, 2);
                 const auto parts = l[2].view({4, 6}).unbind(0);
                 return x.mean().to(at::kFloat) + (parts[0] * parts[2]).sum().to(at::kFloat);
               });
}

TEST(Backward, SparseGradients) {
  at::manual_seed(6);
  const at::Tensor index = at::tensor({1, 3, 1}, at::kLong);
  const Leaves values{at::randn({5, 4})};
  Leaves grads;
  for (const bool ours : {true, false}) {
    const Leaves leaves = leaves_of(values);
    const at::Tensor loss = (at::embedding(leaves[0], index, -1, false, true) * 3 +
                             at::embedding(leaves[0], index + 1, -1, false, true))
                                .sum();
    ours ? backward(loss) : loss.backward();
    ASSERT_TRUE(leaves[0].grad().is_sparse());
    grads.push_back(leaves[0].grad().coalesce().to_dense());
  }
  EXPECT_TRUE(same_bits(grads[0], grads[1]));
}

TEST(Backward, FunctionsOfTheUsersOwn) {
  at::manual_seed(7);
  expect_alike({at::randn({5}), at::randn({5})}, [](const Leaves& l) {
    return Doubling::apply(l[0] * l[1], l[1]).square().sum() + l[1].sum();
  });
  expect_alike({at::randn({5})},
               [](const Leaves& l) { return (Nested::apply(l[0].exp()) * 3).sum(); });
}

/// The engine's task of the outer backward says which gradients are wanted: not the inner leaf's.
TEST(Backward, WithinABackwardThatTheEngineRuns) {
  at::manual_seed(9);
  const at::Tensor leaf = at::randn({5}).requires_grad_();
  const auto gradient_of = [&](auto function) {
    return torch::autograd::grad({(function(leaf.exp()) * 3).sum()}, {leaf})[0];
  };
  EXPECT_TRUE(same_bits(gradient_of([](const at::Tensor& a) { return Nested::apply(a); }),
                        gradient_of([](const at::Tensor& a) { return a.square(); })));
}

TEST(Backward, LeavesWhatIsWithinAnotherBackwardToTheEngine) {
  struct Looking : Function<Looking> {
    static at::Tensor forward(AutogradContext* context, const at::Tensor& a,
                              const at::Tensor& walks) {
      context->saved_data["walks"] = walks;
      return a.clone();
    }
    static variable_list backward(AutogradContext* context, variable_list gradients) {
      const c10::AutoGradMode grad(true);
      context->saved_data["walks"].toTensor().fill_(
          walks_backward(at::ones({2}).requires_grad_().sum()));
      return {gradients[0], at::Tensor()};
    }
  };
  const at::Tensor leaf = at::ones({2}).requires_grad_();
  for (const bool ours : {true, false}) {
    const at::Tensor walks = at::ones({}, at::kBool);
    const at::Tensor loss = Looking::apply(leaf, walks).sum();
    ASSERT_TRUE(walks_backward(loss));
    ours ? backward(loss) : loss.backward();
    EXPECT_FALSE(walks.item<bool>());
  }
  EXPECT_THROW(backward(Failing::apply(leaf).sum()), std::out_of_range);
  EXPECT_TRUE(walks_backward(leaf.sum())) << "also after one that failed";
}

TEST(Backward, LeavesThatWantAnotherDtype) {
  const std::optional<at::ScalarType> wanted[] = {at::kFloat, at::kDouble, at::kBFloat16,
                                                  std::nullopt};
  for (const auto& dtype : wanted) {
    Leaves grads;
    for (const bool ours : {true, false}) {
      Leaves leaves = leaves_of({at::rand({4}), at::rand({4})});
      for (const at::Tensor& leaf : leaves) leaf.set_grad_dtype(dtype);
      const at::Tensor loss = (leaves[0] * 2).sum() + Widening::apply(leaves[1]).sum();
      EXPECT_TRUE(walks_backward(loss));
      ours ? backward(loss) : loss.backward();
      for (const at::Tensor& leaf : leaves) grads.push_back(leaf.grad());
    }
    EXPECT_TRUE(same_bits(grads[0], grads[2])) << grads[0].dtype() << " " << grads[2].dtype();
    EXPECT_TRUE(same_bits(grads[1], grads[3])) << grads[1].dtype() << " " << grads[3].dtype();
  }
}

/// Graphs of random shape: any value may be used any number of times.
TEST(Backward, RandomGraphs) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int graph = 0; graph < 40; ++graph) {
    at::manual_seed(random());
    std::vector<unsigned> choices(60);
    for (unsigned& choice : choices) choice = random();
    expect_alike({at::randn({3, 3}), at::randn({3}), at::randn({3, 1}), at::randn({})},
                 [&](const Leaves& leaves) {
                   Leaves values = leaves;
                   for (size_t i = 0; i + 2 < choices.size(); i += 3) {
                     const at::Tensor& a = values[choices[i] % values.size()];
                     const at::Tensor& b = values[choices[i + 1] % values.size()];
                     switch (choices[i + 2] % 5) {
                       case 0:
                         values.push_back(a + b);
                         break;
                       case 1:
                         values.push_back(at::tanh(a) * b);
                         break;
                       case 2:
                         values.push_back(at::sigmoid(a) - b);
                         break;
                       case 3:
                         values.push_back(at::where(b > 0, a, b));
                         break;
                       default:
                         values.push_back(at::tanh(a).sum() * at::cos(b));
                         break;
                     }
                   }
                   at::Tensor sum = values.back().sum();
                   for (const at::Tensor& leaf : leaves) sum = sum + leaf.sum();
                   return sum;
                 });
  }
}

TEST(Backward, AGradientOfTheCallers) {
  at::manual_seed(8);
  const at::Tensor gradient = at::randn({4});
  Leaves grads;
  for (const bool ours : {true, false}) {
    const at::Tensor leaf = leaves_of({at::ones({4})})[0];
    const at::Tensor value = leaf * 3;
    ours ? backward(value, gradient) : value.backward(gradient);
    grads.push_back(leaf.grad());
  }
  EXPECT_TRUE(same_bits(grads[0], grads[1]));
}

TEST(Backward, TakesGradientsOverWithoutACopy) {
  const at::Tensor leaf = at::ones({4}).requires_grad_();
  std::vector<size_t> order;
  auto accumulator = torch::autograd::impl::grad_accumulator(leaf);
  accumulator->add_post_hook(std::make_unique<Arrival>(order, 0));
  struct Giving : Function<Giving> {
    static at::Tensor forward(AutogradContext* context, const at::Tensor& a, at::Tensor* given) {
      context->saved_data["given"] = std::move(*given);
      return a.sum();
    }
    static variable_list backward(AutogradContext* context, const variable_list&) {
      const at::Tensor given = context->saved_data["given"].toTensor();
      context->saved_data.clear();
      return {given, at::Tensor()};
    }
  };
  at::Tensor given = at::ones({4});
  const void* const expected = given.const_data_ptr();
  backward(Giving::apply(leaf, &given));
  EXPECT_EQ(leaf.grad().const_data_ptr(), expected);
}

/// The graph's own errors are LibTorch's.
TEST(Backward, ThrowsWhatTheEngineThrows) {
  const auto what = [](const std::function<void()>& action) -> std::string {
    try {
      action();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "nothing";
  };
  const at::Tensor leaf = at::ones({3}).requires_grad_();
  const auto twice = [&](bool ours) {
    return what([&] {
      const at::Tensor loss = leaf.exp().sum();
      loss.backward();
      ours ? backward(loss) : loss.backward();
    });
  };
  EXPECT_EQ(twice(true), twice(false));
  EXPECT_NE(twice(true).find("a second time"), std::string::npos);
  EXPECT_THROW(backward(Failing::apply(leaf).sum()), std::out_of_range);
  EXPECT_EQ(what([&] { backward(leaf * 2); }), what([&] { (leaf * 2).backward(); }));
  EXPECT_EQ(what([&] { backward(at::ones({})); }), what([&] { at::ones({}).backward(); }));
  EXPECT_EQ(what([&] { backward(leaf.sum(), at::ones({3})); }),
            what([&] { leaf.sum().backward(at::ones({3})); }));
  EXPECT_THROW(backward(at::Tensor()), std::exception);
  const at::Tensor complex = at::ones({3}, at::kComplexFloat).requires_grad_();
  EXPECT_EQ(what([&] { backward(complex.sum()); }), what([&] { complex.sum().backward(); }));
  EXPECT_NE(what([&] { backward(complex.sum()); }), "nothing");
  const at::Tensor wide = at::ones({}, at::kDouble);
  EXPECT_EQ(what([&] { backward(leaf.sum(), wide); }), what([&] { leaf.sum().backward(wide); }));
}

TEST(Backward, LeavesToTheEngineWhatItAloneKnows) {
  const at::Tensor leaf = at::ones({3}).requires_grad_();
  EXPECT_TRUE(walks_backward(leaf.exp().sum()));
  EXPECT_FALSE(walks_backward(leaf));

  at::Tensor seen;
  at::Tensor hooked = leaf.exp();
  hooked.register_hook([&](const at::Tensor& gradient) { seen = gradient; });
  const at::Tensor loss = hooked.sum();
  EXPECT_FALSE(walks_backward(loss));
  backward(loss);
  EXPECT_TRUE(seen.defined());

  at::Tensor retained = leaf.exp();
  retained.retain_grad();
  backward(retained.sum());
  EXPECT_TRUE(retained.grad().defined());

  bool called_back = false;
  struct AtEnd : torch::autograd::FunctionPostHook {
    explicit AtEnd(bool& called) : called_(called) {}
    variable_list operator()(const variable_list& outputs, const variable_list&) override {
      torch::autograd::Engine::get_default_engine().queue_callback([this] { called_ = true; });
      return outputs;
    }
    bool& called_;
  };
  const at::Tensor sum = leaf.sum();
  sum.grad_fn()->add_post_hook(std::make_unique<AtEnd>(called_back));
  EXPECT_FALSE(walks_backward(sum));
  backward(sum);
  EXPECT_TRUE(called_back);

  const torch::autograd::DetectAnomalyGuard anomaly;
  EXPECT_FALSE(walks_backward(leaf.exp().sum()));
}

TEST(Backward, MakesNoGraph) {
  const at::Tensor leaf = at::ones({3}).requires_grad_();
  backward(leaf.square().sum());
  EXPECT_FALSE(leaf.grad().requires_grad());
}

/// Longer than a recursive walk's stack would hold.
TEST(Backward, DeepGraphs) {
  const at::Tensor leaf = at::ones({}).requires_grad_();
  at::Tensor value = leaf;
  for (int i = 0; i < 20'000; ++i) value = value + 0;
  backward(value);
  EXPECT_EQ(leaf.grad().item<float>(), 1);
}

}  // namespace backward_test
}  // namespace lockstep
