#include "lockstep/models/models.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <map>
#include <optional>

#include "lockstep/autograd/linear.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/models/norm_pool.h"
#include "lockstep/models/resnet.h"
#include "lockstep/models/script_model.h"

namespace lockstep {
namespace {

namespace nn = torch::nn;

/// "NAME" or "NAME:KEY=VALUE,KEY=VALUE", as `--model` takes it.
class ModelSpec {
 public:
  /// Throws UsageError for what is not of this form, and for a key that comes twice.
  explicit ModelSpec(const std::string& text) : text_(text) {
    const size_t colon = text.find(':');
    name_ = text.substr(0, colon);
    if (colon == std::string::npos) return;
    for (const std::string& part : split(text.substr(colon + 1), ',')) {
      const size_t equals = part.find('=');
      if (equals == std::string::npos || equals == 0 || equals + 1 == part.size()) {
        throw UsageError("model '" + text + "': '" + part + "' is no KEY=VALUE",
                         "for example gpt:layers=2,heads=2,channels=64");
      }
      if (!values_.emplace(part.substr(0, equals), part.substr(equals + 1)).second) {
        throw UsageError("model '" + text + "': '" + part.substr(0, equals) + "' comes twice");
      }
    }
  }

  const std::string& name() const { return name_; }

  /// A whole number of at least 1; none where the key is absent.
  std::optional<int64_t> size(const std::string& key) const {
    const auto found = values_.find(key);
    if (found == values_.end()) return std::nullopt;
    const auto value = parse_int(found->second);
    if (value && *value >= 1) return value;
    throw UsageError("model '" + text_ + "': " + key + " is '" + found->second +
                     "'; expected a whole number of at least 1");
  }

  std::optional<double> number(const std::string& key) const {
    const auto found = values_.find(key);
    if (found == values_.end()) return std::nullopt;
    const auto value = parse_double(found->second);
    if (value) return value;
    throw UsageError("model '" + text_ + "': " + key + " is '" + found->second +
                     "'; expected a number");
  }

  /// Throws UsageError for a key that is not one of these, with those that may be meant.
  void expect_keys(const std::vector<std::string>& known) const {
    for (const auto& [key, value] : values_) {
      if (std::ranges::find(known, key) != known.end()) continue;
      if (known.empty()) {
        throw UsageError("model '" + text_ + "': " + name_ + " has no sizes to choose",
                         "write --model " + name_);
      }
      throw UsageError("model '" + text_ + "': " + unknown_word("size", key, known));
    }
  }

 private:
  std::string text_;
  std::string name_;
  std::map<std::string, std::string> values_;
};

at::Tensor as_rows(const char* model, const at::Tensor& input, int64_t features,
                   const char* expected) {
  if (input.dim() == 2 && input.size(1) == features) return input;
  if (input.dim() < 2 || input.numel() != input.size(0) * features) {
    throw UsageError(std::string("model ") + model + ": the input has shape " +
                     c10::str(input.sizes()) + ", expected " + expected);
  }
  return input.flatten(1);
}

at::Tensor as_images(const char* model, const at::Tensor& input) {
  if (input.dim() == 4 && input.size(1) == 1 && input.size(2) == 28 && input.size(3) == 28) {
    return input;
  }
  const at::Tensor rows = as_rows(model, input, 784, "[batch, 1, 28, 28] or [batch, 784]");
  return rows.reshape({input.size(0), 1, 28, 28});
}

at::Tensor through(const nn::Linear& layer, const at::Tensor& x) {
  return linear(x, layer->weight, layer->bias);
}

/// Linear layers with ReLU between them, as nn.Sequential(Linear, ReLU, ..., Linear).
class Perceptron : public Model {
 public:
  Perceptron(const char* name, const std::vector<int64_t>& widths) : Model(name), label_(name) {
    auto children = register_module("layers", std::make_shared<nn::Module>("layers"));
    for (size_t i = 0; i + 1 < widths.size(); ++i) {
      layers_.push_back(
          children->register_module(std::to_string(2 * i), nn::Linear(widths[i], widths[i + 1])));
    }
  }

  std::vector<ModelLayer> layers() override {
    std::vector<ModelLayer> chain;
    const auto add = [&](std::shared_ptr<nn::Module> module, auto forward) {
      chain.push_back({"layers." + std::to_string(chain.size()), std::move(module), forward});
    };
    for (const nn::Linear& layer : layers_) {
      if (chain.empty()) {
        add(layer.ptr(), [layer, label = label_](const at::Tensor& x) {
          return through(layer, as_rows(label, x, 784, "[batch, 784] or [batch, 1, 28, 28]"));
        });
      } else {
        add(nullptr, [](const at::Tensor& x) { return at::relu(x); });
        add(layer.ptr(), [layer](const at::Tensor& x) { return through(layer, x); });
      }
    }
    return chain;
  }

 private:
  const char* label_;
  std::vector<nn::Linear> layers_;
};

class LinearRegression : public Model {
 public:
  LinearRegression() : Model("linear") {
    // A bare nn.Linear in Python: its tensors have no prefix. The layer draws the initial values.
    nn::Linear layer(kFeatures, 1);
    weight_ = register_parameter("weight", layer->weight.detach());
    bias_ = register_parameter("bias", layer->bias.detach());
  }

  at::Tensor forward(at::Tensor input) override {
    return linear(as_rows("linear", input, kFeatures, "[batch, 20]"), weight_, bias_);
  }

  std::vector<ModelLayer> layers() override {
    const auto self = std::static_pointer_cast<LinearRegression>(shared_from_this());
    return {{"", self, [self](const at::Tensor& x) { return self->forward(x); }}};
  }

 private:
  static constexpr int64_t kFeatures = 20;
  at::Tensor weight_;
  at::Tensor bias_;
};

/// Convolution, batch norm, ReLU and 2x2 pooling, as the nn.Sequential of seed 001.
class ConvBlock : public nn::Module {
 public:
  explicit ConvBlock(const nn::Conv2dOptions& options)
      : conv_(register_module("0", nn::Conv2d(options))),
        norm_(register_module("1", nn::BatchNorm2d(options.out_channels()))) {}

  at::Tensor forward(const at::Tensor& x) { return norm_relu_pool(conv_->forward(x), *norm_); }

 private:
  nn::Conv2d conv_;
  nn::BatchNorm2d norm_;
};

ModelLayer first_block(const char* model, std::shared_ptr<ConvBlock> block) {
  return {"layer1", block,
          [model, block](const at::Tensor& x) { return block->forward(as_images(model, x)); }};
}

ModelLayer next_block(const char* name, std::shared_ptr<ConvBlock> block) {
  return {name, block, [block](const at::Tensor& x) { return block->forward(x); }};
}

class ConvNet : public Model {
 public:
  ConvNet()
      : Model("convnet"),
        layer1_(register_module("layer1", block(1, 16))),
        layer2_(register_module("layer2", block(16, 32))),
        fc_(register_module("fc", nn::Linear(7 * 7 * 32, 10))) {}

  std::vector<ModelLayer> layers() override {
    return {first_block("convnet", layer1_),
            next_block("layer2", layer2_),
            {"fc", fc_.ptr(), [fc = fc_](const at::Tensor& x) {
               return through(fc, x.reshape({x.size(0), -1}));
             }}};
  }

 private:
  static std::shared_ptr<ConvBlock> block(int64_t in, int64_t out) {
    return std::make_shared<ConvBlock>(nn::Conv2dOptions(in, out, 5).stride(1).padding(2));
  }

  std::shared_ptr<ConvBlock> layer1_;
  std::shared_ptr<ConvBlock> layer2_;
  nn::Linear fc_;
};

class FashionCnn : public Model {
 public:
  FashionCnn()
      : Model("fashion-cnn"),
        layer1_(register_module(
            "layer1", std::make_shared<ConvBlock>(nn::Conv2dOptions(1, 32, 3).padding(1)))),
        layer2_(
            register_module("layer2", std::make_shared<ConvBlock>(nn::Conv2dOptions(32, 64, 3)))),
        fc1_(register_module("fc1", nn::Linear(64 * 6 * 6, 600))),
        drop_(register_module("drop", nn::Dropout(0.25))),
        fc2_(register_module("fc2", nn::Linear(600, 120))),
        fc3_(register_module("fc3", nn::Linear(120, 10))) {}

  std::vector<ModelLayer> layers() override {
    const auto linear_layer = [](const char* name, const nn::Linear& layer) {
      return ModelLayer{name, layer.ptr(),
                        [layer](const at::Tensor& x) { return through(layer, x); }};
    };
    return {
        first_block("fashion-cnn", layer1_),
        next_block("layer2", layer2_),
        {"fc1", fc1_.ptr(), [fc = fc1_](const at::Tensor& x) { return through(fc, x.flatten(1)); }},
        {"drop", drop_.ptr(),
         [drop = drop_](const at::Tensor& x) mutable { return drop->forward(x); }},
        linear_layer("fc2", fc2_),
        linear_layer("fc3", fc3_)};
  }

 private:
  std::shared_ptr<ConvBlock> layer1_;
  std::shared_ptr<ConvBlock> layer2_;
  nn::Linear fc1_;
  nn::Dropout drop_;
  nn::Linear fc2_;
  nn::Linear fc3_;
};

GptOptions gpt_options(const ModelSpec& spec, int64_t classes) {
  spec.expect_keys({"layers", "heads", "channels", "context", "vocabulary", "dropout", "bias"});
  GptOptions options;
  options.layers = spec.size("layers").value_or(options.layers);
  options.heads = spec.size("heads").value_or(options.heads);
  options.channels = spec.size("channels").value_or(options.channels);
  options.context = spec.size("context").value_or(options.context);
  options.vocabulary = spec.size("vocabulary").value_or(classes > 0 ? classes : options.vocabulary);
  options.dropout = spec.number("dropout").value_or(options.dropout);
  options.bias = spec.number("bias").value_or(1) != 0;
  check_gpt_options(options);
  return options;
}

int64_t resnet_classes(const ModelSpec& spec, int64_t classes) {
  constexpr int64_t kImageNet = 1000;
  spec.expect_keys({"classes"});
  return spec.size("classes").value_or(classes > 0 ? classes : kImageNet);
}

/// A model without sizes.
struct Plain {
  ModelInfo info;
  std::shared_ptr<Model> (*make)();
};

const std::vector<Plain>& plain_models() {
  using Made = std::shared_ptr<Model>;
  static const std::vector<Plain> all = {
      {{"mlp", {784}, 10},
       []() -> Made {
         return std::make_shared<Perceptron>("mlp", std::vector<int64_t>{784, 128, 64, 10});
       }},
      {{"convnet", {1, 28, 28}, 10}, []() -> Made { return std::make_shared<ConvNet>(); }},
      {{"linear", {20}, 1, /*regression=*/true},
       []() -> Made { return std::make_shared<LinearRegression>(); }},
      {{"fashion-cnn", {1, 28, 28}, 10}, []() -> Made { return std::make_shared<FashionCnn>(); }},
      {{"wide", {784}, 10},
       []() -> Made {
         return std::make_shared<Perceptron>(
             "wide", std::vector<int64_t>{784, 784, 784, 784, 784, 784, 784, 10});
       }},
  };
  return all;
}

const Plain* plain_model(const std::string& name) {
  for (const Plain& plain : plain_models()) {
    if (plain.info.name == name) return &plain;
  }
  return nullptr;
}

}  // namespace

at::Tensor Model::forward(at::Tensor input) {
  const std::vector<ModelLayer> chain = layers();
  if (chain.empty()) throw UsageError("model " + name() + " has neither layers nor a forward");
  for (const ModelLayer& layer : chain) input = layer.forward(input);
  return input;
}

std::shared_ptr<nn::Module> Model::clone(const std::optional<c10::Device>& device) const {
  const at::NoGradGuard no_grad;
  const auto copy = make_again();
  const auto take = [&](const auto& from, const auto& to) {
    if (from.size() != to.size()) throw UsageError("model " + name() + " cannot be copied");
    for (size_t i = 0; i < from.size(); ++i) {
      const at::Tensor& tensor = from[i].value();
      at::Tensor(to[i].value())
          .set_data(device ? tensor.detach().to(*device, false, true) : tensor.detach().clone());
      at::Tensor(to[i].value()).set_requires_grad(tensor.requires_grad());
    }
  };
  take(named_parameters(), copy->named_parameters());
  take(named_buffers(), copy->named_buffers());
  copy->train(is_training());
  const auto mine = modules(/*include_self=*/false), its = copy->modules(/*include_self=*/false);
  for (size_t i = 0; i < mine.size(); ++i) {
    if (its[i]->is_training() != mine[i]->is_training()) its[i]->train(mine[i]->is_training());
  }
  return copy;
}

std::shared_ptr<Model> Model::make_again() const {
  return make_model(name());
}

std::shared_ptr<Model> make_model(const std::string& name, int64_t classes) {
  if (names_script_file(name)) return load_script_model(name);
  const ModelSpec spec(name);
  if (spec.name() == "gpt") return make_gpt(gpt_options(spec, classes));
  if (spec.name() == "resnet18") return make_resnet18(resnet_classes(spec, classes));
  model_info(name);  // Throws for an unknown name, and for sizes.
  return plain_model(spec.name())->make();
}

ModelInfo model_info(const std::string& name, int64_t classes) {
  if (names_script_file(name)) return {.name = name, .from_file = true};
  const ModelSpec spec(name);
  if (spec.name() == "gpt") {
    const GptOptions options = gpt_options(spec, classes);
    return {.name = "gpt",
            .input_shape = {options.context},
            .outputs = options.vocabulary,
            .input_dtype = at::kLong,
            .per_token = true};
  }
  if (spec.name() == "resnet18")
    return {.name = "resnet18",
            .input_shape = {3, 224, 224},
            .outputs = resnet_classes(spec, classes),
            .any_image_size = true};
  const Plain* plain = plain_model(spec.name());
  if (plain == nullptr)
    throw UsageError(unknown_word("model", spec.name(), model_names()),
                     "a TorchScript file is named by a path that ends in .pt");
  spec.expect_keys({});
  return plain->info;
}

void check_model_name(const std::string& flag, const std::string& name) {
  if (names_script_file(name)) return;
  const ModelSpec spec(name);
  expect_one_of(flag, spec.name(), model_names());
  model_info(name);
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const Plain& plain : plain_models()) names.push_back(plain.info.name);
  names.insert(names.end(), {"gpt", "resnet18"});
  return names;
}

}  // namespace lockstep
