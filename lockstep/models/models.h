#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// A part of a model: the output of one is the input of the next.
struct ModelLayer {
  std::string name;                           ///< As the names of its tensors begin.
  std::shared_ptr<torch::nn::Module> module;  ///< Null for a layer without tensors (ReLU).
  std::function<at::Tensor(const at::Tensor&)> forward;
};

/// A model of one input and one output, as the trainer and the examples use it.
class Model : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;
  /// `input` is a batch, float32, first dimension the samples. Images may be flat ([B, 784]) or not
  /// ([B, 1, 28, 28]). Gives [B, outputs]. Throws UsageError naming the shape that does not fit.
  virtual at::Tensor forward(at::Tensor input) = 0;
  /// The model as a chain: their forwards one after the other are `forward`, to the same bits. They
  /// keep what they need alive. Empty: it is no chain.
  virtual std::vector<ModelLayer> layers() { return {}; }
  /// What make_model gives for this name, with copies of this model's tensors. Draws random
  /// numbers. To be overridden where the name does not say all. Throws UsageError otherwise.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override;
};

/// What a model expects and gives. Lets a mismatch with a dataset be named before training.
struct ModelInfo {
  std::string name;
  std::vector<int64_t> input_shape;  ///< Of one sample: {784}, {1, 28, 28}, {20}.
  int64_t outputs = 0;
  bool regression = false;  ///< Mean squared error in place of cross-entropy.
};

/// Makes a model with fresh parameters, in the order in which Python's modules make them. So
/// torch::manual_seed(S) just before gives Python's bits. Parameter names are those of the Python
/// twin's state_dict:
///
/// | name        | what                                                        | names           |
/// |-------------|-------------------------------------------------------------|-----------------|
/// | mlp         | Linear 784-128-64-10 with ReLU between                      | layers.{0,2,4}.*|
/// | convnet     | seed 001's: two of conv 5x5 (16, 32), batch norm, ReLU,     | layer{1,2}.{0,1}|
/// |             | pooling; Linear 1568-10                                     | .*, fc.*        |
/// | linear      | Linear(20, 1) for mean squared error                        | weight, bias    |
/// | fashion-cnn | conv 3x3 (32 padded, 64), batch norm, ReLU, pooling; Linear | layer{1,2}.{0,1}|
/// |             | 600, 120, 10, dropout 0.25 before the second                | .*, fc{1,2,3}.* |
/// | wide        | 6 x Linear(784, 784) with ReLU, Linear(784, 10)             | layers.{0,2,..} |
///
/// `layers.N` are the names of an nn.Sequential called `layers` whose odd members are ReLUs.
/// Throws UsageError with the nearest name for an unknown one.
std::shared_ptr<Model> make_model(const std::string& name);
/// Throws like make_model.
const ModelInfo& model_info(const std::string& name);
std::vector<std::string> model_names();

}  // namespace lockstep
