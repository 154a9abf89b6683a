#include "lockstep/models/models.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "lockstep/base/error.h"

namespace lockstep {
namespace models_test {

std::vector<std::string> tensor_names(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& item : module.named_parameters()) names.push_back(item.key());
  for (const auto& item : module.named_buffers()) names.push_back(item.key());
  return names;
}

TEST(Models, EveryNameMakesAModelOfItsShape) {
  for (const std::string& name : model_names()) {
    SCOPED_TRACE(name);
    const ModelInfo info = model_info(name);
    EXPECT_EQ(info.name, name);
    auto model = make_model(name);
    std::vector<int64_t> shape{2};
    shape.insert(shape.end(), info.input_shape.begin(), info.input_shape.end());
    const bool tokens = info.input_dtype == at::kLong;
    at::Tensor out =
        model->forward(tokens ? at::randint(info.outputs, shape, at::kLong) : at::randn(shape));
    std::vector<int64_t> expected{2, info.outputs};
    if (info.per_token) expected.insert(expected.begin() + 1, info.input_shape.at(0));
    EXPECT_EQ(out.sizes(), at::IntArrayRef(expected));
    EXPECT_TRUE(out.requires_grad());
    for (const auto& parameter : model->parameters()) EXPECT_TRUE(parameter.is_leaf());
  }
}

TEST(Models, NamesAreThoseOfPythonsStateDict) {
  EXPECT_EQ(tensor_names(*make_model("mlp")),
            (std::vector<std::string>{"layers.0.weight", "layers.0.bias", "layers.2.weight",
                                      "layers.2.bias", "layers.4.weight", "layers.4.bias"}));
  EXPECT_EQ(tensor_names(*make_model("linear")), (std::vector<std::string>{"weight", "bias"}));
  EXPECT_EQ(
      tensor_names(*make_model("convnet")),
      (std::vector<std::string>{
          "layer1.0.weight", "layer1.0.bias", "layer1.1.weight", "layer1.1.bias", "layer2.0.weight",
          "layer2.0.bias", "layer2.1.weight", "layer2.1.bias", "fc.weight", "fc.bias",
          "layer1.1.running_mean", "layer1.1.running_var", "layer1.1.num_batches_tracked",
          "layer2.1.running_mean", "layer2.1.running_var", "layer2.1.num_batches_tracked"}));
}

TEST(Models, FlatAndSquareImagesGiveTheSame) {
  at::Tensor images = at::randn({4, 1, 28, 28});
  for (const std::string name : {"mlp", "convnet", "fashion-cnn", "wide"}) {
    SCOPED_TRACE(name);
    auto model = make_model(name);
    model->eval();
    EXPECT_TRUE(at::equal(model->forward(images), model->forward(images.flatten(1))));
  }
}

TEST(Models, SameSeedSameParameters) {
  at::manual_seed(5);
  auto a = make_model("mlp");
  at::manual_seed(5);
  auto b = make_model("mlp");
  for (size_t i = 0; i < a->parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(a->parameters()[i], b->parameters()[i]));
  }
}

TEST(Models, DropoutOnlyInTraining) {
  auto model = make_model("fashion-cnn");
  at::Tensor images = at::randn({2, 784});
  EXPECT_FALSE(at::equal(model->forward(images), model->forward(images)));
  model->eval();
  EXPECT_TRUE(at::equal(model->forward(images), model->forward(images)));
}

TEST(Models, AWrongShapeIsNamed) {
  for (const std::string& name : model_names()) {
    SCOPED_TRACE(name);
    try {
      make_model(name)->forward(at::zeros({2, 7}));
      FAIL() << "accepted";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("[2, 7]"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
    EXPECT_THROW(make_model(name)->forward(at::zeros({20})), UsageError);
  }
}

TEST(Models, UnknownNameSuggestsTheNearest) {
  try {
    make_model("convnte");
    FAIL() << "accepted";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("convnet"), std::string::npos) << error.what();
  }
  EXPECT_THROW(model_info("resnet5000"), UsageError);
}

TEST(Models, SizesStandBehindAColonAndClassesComeFromTheData) {
  const ModelInfo small = model_info("gpt:layers=1,heads=2,channels=8,context=4", 7);
  EXPECT_EQ(small.input_shape, (std::vector<int64_t>{4}));
  EXPECT_EQ(small.outputs, 7);
  EXPECT_EQ(model_info("gpt:vocabulary=9", 7).outputs, 9);
  EXPECT_EQ(model_info("gpt").outputs, 65);
  EXPECT_EQ(model_info("resnet18").outputs, 1000);
  EXPECT_EQ(model_info("resnet18", 10).outputs, 10);
  EXPECT_EQ(model_info("resnet18:classes=3", 10).outputs, 3);
  EXPECT_EQ(model_info("mlp", 3).outputs, 10);
  const auto model = make_model("gpt:layers=1,heads=2,channels=8,context=4", 7);
  EXPECT_EQ(model->forward(at::zeros({2, 4}, at::kLong)).sizes(), at::IntArrayRef({2, 4, 7}));
}

TEST(Models, WrongSizesAreNamed) {
  const auto message_of = [](const std::string& name) -> std::string {
    try {
      check_model_name("--model", name);
      make_model(name);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "accepted";
  };
  using testing::HasSubstr;
  EXPECT_THAT(message_of("gpt:layer=2"), HasSubstr("unknown size 'layer'; did you mean 'layers'?"));
  EXPECT_THAT(message_of("gpt:layers"), HasSubstr("'layers' is no KEY=VALUE"));
  EXPECT_THAT(message_of("gpt:layers=0"), HasSubstr("layers is '0'; expected a whole number"));
  EXPECT_THAT(message_of("gpt:layers=2,layers=3"), HasSubstr("'layers' comes twice"));
  EXPECT_THAT(message_of("gpt:dropout=much"), HasSubstr("dropout is 'much'; expected a number"));
  EXPECT_THAT(message_of("gpt:heads=7"), HasSubstr("384 channels cannot be shared by 7 heads"));
  EXPECT_THAT(message_of("mlp:layers=2"), HasSubstr("mlp has no sizes to choose"));
  EXPECT_THAT(message_of("mpl"), HasSubstr("--model: unknown value 'mpl'; expected one of mlp, "));
}

}  // namespace models_test
}  // namespace lockstep
