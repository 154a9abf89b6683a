#include "lockstep/autograd/activation_checkpoint.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/autograd/backward.h"
#include "lockstep/autograd/recorded_state.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace activation_checkpoint_test {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

/// A small net with dropout, whose parts may be checkpointed.
struct Net {
  at::Tensor first = at::randn({16, 8}).requires_grad_(),
             second = at::randn({4, 16}).requires_grad_();
  int runs = 0;

  at::Tensor hidden(const at::Tensor& x) {
    ++runs;
    return at::dropout(at::tanh(at::linear(x, first)), 0.5, /*train=*/true);
  }
  at::Tensor top(const at::Tensor& x) { return at::linear(x, second); }
};

struct Results {
  at::Tensor output, grad_x, grad_first, grad_second, next_random;
};

enum class Way { plain, checkpointed, nested };

Results run(Net& net, Way way, bool input_needs_gradient, bool own_walk) {
  at::manual_seed(5);
  const at::Tensor x = at::randn({6, 8}).set_requires_grad(input_needs_gradient);
  for (const at::Tensor& parameter : {net.first, net.second}) parameter.mutable_grad().reset();
  const auto hidden = [&net](const at::Tensor& in) { return net.hidden(in); };
  const auto both = [&net, hidden, way](const at::Tensor& in) {
    return net.top(way == Way::nested ? checkpoint(hidden, in) : hidden(in));
  };
  const at::Tensor output = way == Way::plain ? both(x) : checkpoint(both, x);
  const at::Tensor loss = (output * output).sum();
  at::manual_seed(9);  // Others draw between forward and backward.
  own_walk ? backward(loss) : loss.backward();
  return {output.detach(), x.grad(), net.first.grad(), net.second.grad(), at::randn({3})};
}

void expect_equal(const Results& a, const Results& b) {
  EXPECT_TRUE(at::equal(a.output, b.output));
  ASSERT_EQ(a.grad_x.defined(), b.grad_x.defined());
  if (a.grad_x.defined()) {
    EXPECT_TRUE(at::equal(a.grad_x, b.grad_x));
  }
  EXPECT_TRUE(at::equal(a.grad_first, b.grad_first));
  EXPECT_TRUE(at::equal(a.grad_second, b.grad_second));
  EXPECT_TRUE(at::equal(a.next_random, b.next_random)) << "backward moved the generator";
}

TEST(ActivationCheckpoint, HasTheBitsOfThePlainFunction) {
  for (const bool input_needs_gradient : {true, false}) {
    for (const bool own_walk : {true, false}) {
      at::manual_seed(1);
      Net net;
      const Results plain = run(net, Way::plain, input_needs_gradient, own_walk);
      EXPECT_EQ(net.runs, 1);
      expect_equal(run(net, Way::checkpointed, input_needs_gradient, own_walk), plain);
      EXPECT_EQ(net.runs, 3) << "backward did not run it again";
      expect_equal(run(net, Way::nested, input_needs_gradient, own_walk), plain);
      EXPECT_EQ(net.runs, 6);
    }
  }
}

TEST(ActivationCheckpoint, KeepsNothingOfTheInside) {
  const at::Tensor x = at::ones({4}).requires_grad_();
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> inner;
  const auto function = [&inner](const at::Tensor& in) {
    const at::Tensor hidden = in.exp();  // exp keeps its result for backward.
    inner = hidden.storage().getWeakStorageImpl();
    return hidden.sum();
  };
  const at::Tensor plain = function(x);
  EXPECT_FALSE(inner->expired());
  const at::Tensor checkpointed = checkpoint(function, x);
  EXPECT_TRUE(inner->expired());
}

TEST(ActivationCheckpoint, TheSecondRunHasAutocastsState) {
  const at::Tensor weight = at::randn({3, 3}).requires_grad_();
  std::vector<at::ScalarType> dtypes;
  const auto function = [&](const at::Tensor& x) {
    const at::Tensor product = at::mm(x, weight);
    dtypes.push_back(product.scalar_type());
    return product;
  };
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  const at::Tensor output = checkpoint(function, at::randn({2, 3}));
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  backward(output.to(at::kFloat).sum());
  EXPECT_THAT(dtypes, ::testing::ElementsAre(at::kBFloat16, at::kBFloat16));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_TRUE(weight.grad().defined());
}

TEST(ActivationCheckpoint, TheSecondRunHasTheGuardsOfTheFirst) {
  std::vector<std::string> seen;
  static thread_local std::string inside;
  const auto enter = [](const char* name) {
    return [name] {
      inside += name;
      return std::shared_ptr<void>(&inside, [](void*) { inside.pop_back(); });
    };
  };
  const auto function = [&](const at::Tensor& in) {
    seen.push_back(inside);
    return in * 2;
  };
  const at::Tensor x = at::ones({2}).requires_grad_();
  at::Tensor output;
  {
    const RecordedGuard outer(enter("a")), inner(enter("b"));
    output = checkpoint(function, x);
  }
  const at::Tensor other = checkpoint(function, x);
  backward((output + other).sum());
  EXPECT_THAT(seen, ::testing::UnorderedElementsAre("", "", "", "ab"));
  EXPECT_EQ(inside, "");
}

TEST(ActivationCheckpoint, SeveralInputsAndOutputs) {
  const at::Tensor a = at::randn({3}).requires_grad_(), b = at::randn({3}).requires_grad_();
  const auto outputs = checkpoint(
      [](const std::vector<at::Tensor>& in) {
        EXPECT_FALSE(in[2].defined());
        // One output is an input, one has no gradient.
        return std::vector<at::Tensor>{in[0] * in[1], in[0], in[3] + 1, in[1] * 2};
      },
      {a, b, {}, at::arange(3)});
  EXPECT_EQ(outputs[2].scalar_type(), at::kLong);
  EXPECT_FALSE(outputs[2].requires_grad());
  backward((outputs[0] + 3 * outputs[1]).sum());  // Nothing flows back from the last one.
  EXPECT_TRUE(at::equal(a.grad(), b.detach() + 3));
  EXPECT_TRUE(at::equal(b.grad(), a.detach()));
}

TEST(ActivationCheckpoint, WithoutAGraphItOnlyRuns) {
  const c10::AutoGradMode no_grad(false);
  const at::Tensor x = at::ones({2}).requires_grad_();
  EXPECT_FALSE(checkpoint([](const at::Tensor& in) { return in * 2; }, x).requires_grad());
}

TEST(ActivationCheckpoint, ASequenceInSegments) {
  int runs = 0;
  std::vector<std::function<at::Tensor(const at::Tensor&)>> functions;
  for (int i = 0; i < 5; ++i) {
    functions.emplace_back([&runs, i](const at::Tensor& x) {
      ++runs;
      return at::sin(x * (i + 1));
    });
  }
  const at::Tensor x = at::randn({4});
  at::Tensor expected;
  for (const int64_t segments : {1, 2, 5}) {
    const at::Tensor leaf = x.clone().requires_grad_();
    runs = 0;
    backward(checkpoint_sequential(functions, segments, leaf).sum());
    EXPECT_EQ(runs, segments == 1 ? 5 : segments == 2 ? 7 : 9);
    if (!expected.defined()) expected = leaf.grad();
    EXPECT_TRUE(at::equal(leaf.grad(), expected)) << segments;
  }
  EXPECT_THROW(checkpoint_sequential(functions, 6, x), UsageError);
  EXPECT_THROW(checkpoint_sequential(functions, 0, x), UsageError);
}

TEST(ActivationCheckpoint, RefusesWhatItCannotDo) {
  const at::Tensor weight = at::ones({2}).requires_grad_(), x = at::ones({2}).requires_grad_();
  const auto product = [&](const at::Tensor& in) { return in * weight; };
  const auto refuses = [](const auto& call, const char* what) {
    EXPECT_THAT(call, ThrowsMessage<UsageError>(HasSubstr(what)));
  };
  refuses([&] { torch::autograd::grad({checkpoint(product, x).sum()}, {x}); },
          "backward with named inputs");
  refuses([&] { checkpoint(product, x).sum().backward({}, true, /*create_graph=*/true); },
          "gradients of gradients");
  bool again = false;
  const auto changing = [&](const at::Tensor& in) {
    return std::exchange(again, true) ? in[0] : in;
  };
  refuses([&] { backward(checkpoint(changing, x).sum()); }, "second run");
}

}  // namespace activation_checkpoint_test
}  // namespace lockstep
