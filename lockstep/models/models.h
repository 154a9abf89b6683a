#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {

/// A model of one input and one output, as the trainer and the examples use it.
class Model : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;
  virtual at::Tensor forward(at::Tensor input) = 0;
};

/// What a model expects and gives; lets a mismatch with a dataset be named before training.
struct ModelInfo {
  std::string name;
  std::vector<int64_t> input_shape;  ///< Of one sample: {784}, {1, 28, 28}, {20}.
  int64_t outputs = 0;
  bool regression = false;  ///< Mean squared error in place of cross-entropy.
};

/// mlp, convnet, linear, fashion-cnn, wide. Parameters are made in the order in which Python's
/// modules make them, so that torch::manual_seed(S) just before gives Python's bits.
/// Throws UsageError with the nearest name for an unknown one.
std::shared_ptr<Model> make_model(const std::string& name);
const ModelInfo& model_info(const std::string& name);
std::vector<std::string> model_names();

}  // namespace lockstep
