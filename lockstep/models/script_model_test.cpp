#include "lockstep/models/script_model.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>

#include <fstream>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"

namespace lockstep {
namespace script_model_test {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

class ScriptModelTest : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }

  /// A layer in a child, with a buffer, as torch.jit.script would write it.
  std::string write(const std::string& forward, bool trainable = true) {
    torch::jit::Module layer("__torch__.Layer");
    layer.register_parameter("weight", at::ones({2, 3}).set_requires_grad(trainable), false);
    layer.register_buffer("seen", at::zeros({1}));
    layer.register_attribute("training", c10::BoolType::get(), true);
    layer.define(forward);
    torch::jit::Module model("__torch__.Net");
    model.register_module("layer", layer);
    model.define("def forward(self, x):\n    return self.layer.forward(x)\n");
    model.save(path("net.pt"));
    return path("net.pt");
  }

 private:
  TemporaryDirectory folder_;
};

constexpr const char* kLinear = R"(
def forward(self, x):
    if self.training:
        self.seen.add_(1)
    return torch.mm(x, self.weight.t())
)";

TEST_F(ScriptModelTest, HasTheNamesOfItsStateDictAndLearns) {
  const auto model = make_model(write(kLinear));
  EXPECT_EQ(model->named_parameters().keys(), (std::vector<std::string>{"layer.weight"}));
  EXPECT_EQ(model->named_buffers().keys(), (std::vector<std::string>{"layer.seen"}));
  const at::Tensor x = at::randn({4, 3});
  const at::Tensor out = model->forward(x);
  EXPECT_TRUE(at::allclose(out, x.mm(at::ones({3, 2}))));
  out.sum().backward();
  at::Tensor weight = model->named_parameters()["layer.weight"];
  EXPECT_TRUE(at::allclose(weight.grad(), x.sum(0).expand({2, 3})));
  {
    const at::NoGradGuard no_grad;
    weight.mul_(2);  // an optimizer's step
  }
  EXPECT_TRUE(at::equal(model->forward(x), 2 * out));
}

TEST_F(ScriptModelTest, FollowsTrainingModeAndDtype) {
  const auto model = make_model(write(kLinear));
  const at::Tensor x = at::randn({4, 3});
  model->forward(x);
  EXPECT_EQ(model->named_buffers()["layer.seen"].item<float>(), 1);
  model->eval();
  model->forward(x);
  EXPECT_EQ(model->named_buffers()["layer.seen"].item<float>(), 1);
  model->train();
  model->forward(x);
  EXPECT_EQ(model->named_buffers()["layer.seen"].item<float>(), 2);
  model->to(at::kDouble);
  EXPECT_EQ(model->forward(x.to(at::kDouble)).scalar_type(), at::kDouble);
}

/// Two layers of one weight, each with a bias of its own; one of them is registered twice.
TEST_F(ScriptModelTest, TiedWeightsStayTiedWhereTheyAreSaved) {
  const at::Tensor shared = at::ones({3, 3}).set_requires_grad(true);
  torch::jit::Module model("__torch__.Tied");
  for (const char* name : {"n", "m"}) {
    torch::jit::Module layer(std::string("__torch__.") + name);
    layer.register_parameter("weight", shared, false);
    layer.register_parameter("bias", at::zeros({3}).set_requires_grad(true), false);
    layer.define("def forward(self, x):\n    return torch.mm(x, self.weight) + self.bias\n");
    model.register_module(name, layer);
    if (name == std::string("m")) model.register_module("again", layer);
  }
  model.define(
      "def forward(self, x):\n"
      "    return self.again.forward(self.m.forward(self.n.forward(x)))\n");
  model.save(path("net.pt"));
  const auto loaded = make_model(path("net.pt"));
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    StateDict state;  // Each name has a copy of its own, as a strategy gathers them.
    for (const auto& item : loaded->named_parameters())
      state.emplace_back(item.key(), at::full_like(item.value(), 2, at::dtype(dtype)));
    ASSERT_EQ(state.size(), 6);
    save_script_model(*loaded, state, path("out.pt"));
    const auto saved = make_model(path("out.pt"))->named_parameters();
    for (const char* name : {"m.weight", "again.weight"})
      EXPECT_TRUE(saved[name].is_same(saved["n.weight"])) << name;
    EXPECT_TRUE(saved["m.bias"].is_same(saved["again.bias"]));
    EXPECT_FALSE(saved["m.bias"].is_same(saved["n.bias"]));
    EXPECT_TRUE(at::equal(saved["n.weight"], at::full({3, 3}, 2, at::dtype(dtype))));
  }
}

TEST_F(ScriptModelTest, WhatIsNoModelIsNamed) {
  EXPECT_THAT([&] { make_model("no/such.pt"); },
              ThrowsMessage<UsageError>(HasSubstr("'no/such.pt': there is no such file")));
  std::ofstream(path("text.pt")) << "not a model";
  EXPECT_THAT([&] { make_model(path("text.pt")); },
              ThrowsMessage<UsageError>(HasSubstr("is no TorchScript")));
  EXPECT_THAT([&] { make_model(write(kLinear, /*trainable=*/false)); },
              ThrowsMessage<UsageError>(HasSubstr("has no parameter to train")));
}

TEST_F(ScriptModelTest, AForwardOfAnotherFormIsNamed) {
  torch::jit::Module two("__torch__.Two");
  two.register_parameter("weight", at::ones({2}).set_requires_grad(true), false);
  two.define("def forward(self, x, y):\n    return x * self.weight + y\n");
  two.save(path("two.pt"));
  EXPECT_THAT([&] { make_model(path("two.pt")); },
              ThrowsMessage<UsageError>(HasSubstr("forward takes 2 inputs without a default")));
  const auto pair = make_model(write("def forward(self, x):\n    return x, self.weight\n"));
  EXPECT_THAT(
      [&] {
        pair->forward(at::zeros({2, 3}));
      },
      ThrowsMessage<UsageError>(HasSubstr("forward gives Tuple, expected one tensor")));
}

TEST_F(ScriptModelTest, ABatchThatDoesNotFitIsNamedInOneLine) {
  const auto model = make_model(write(kLinear));
  EXPECT_THAT(
      [&] {
        model->forward(at::zeros({2, 5}));
      },
      ThrowsMessage<UsageError>(AllOf(HasSubstr("cannot take a batch [2, 5] of Float"),
                                      HasSubstr("mat1 and mat2 shapes cannot be multiplied"))));
}

}  // namespace script_model_test
}  // namespace lockstep
