#pragma once

#include <c10/core/ScalarType.h>
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
  /// `input` is a batch, first dimension the samples, of ModelInfo's dtype and shape. Where the
  /// shape is {784} or {1, 28, 28}, images may be flat ([B, 784]) or not ([B, 1, 28, 28]). Gives
  /// [B, outputs], or [B, T, outputs] with ModelInfo::per_token. Throws UsageError naming the shape
  /// that does not fit.
  virtual at::Tensor forward(at::Tensor input) = 0;
  /// The model as a chain: their forwards one after the other are `forward`, to the same bits. They
  /// keep what they need alive. Empty: it is no chain.
  virtual std::vector<ModelLayer> layers() { return {}; }
  /// A model of the same layers, with copies of this model's tensors. Draws random numbers.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override;

 protected:
  /// Of the same layers: what make_model gives for this name. To be overridden where the name does
  /// not say all.
  virtual std::shared_ptr<Model> make_again() const;
};

/// What a model expects and gives. Lets a mismatch with a dataset be named before training.
struct ModelInfo {
  std::string name = {};
  /// Of one sample: {784}, {1, 28, 28}, {20}, {128} tokens. Of a TorchScript file it is not known,
  /// and empty.
  std::vector<int64_t> input_shape = {};
  int64_t outputs = 0;                      ///< 0: not known (a TorchScript file).
  bool regression = false;                  ///< Mean squared error in place of cross-entropy.
  at::ScalarType input_dtype = at::kFloat;  ///< int64 for tokens.
  bool per_token = false;                   ///< A class for each token, not for the whole sample.
  /// Images of other heights and widths than `input_shape` has are as welcome.
  bool any_image_size = false;
  bool from_file = false;  ///< TorchScript: only a batch can tell what it takes and gives.
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
/// | gpt         | nanoGPT's transformer: see GptOptions                       | transformer.*,  |
/// |             |                                                             | lm_head.weight  |
/// | resnet18    | torchvision's, for images of 3 channels and any size        | conv1.*, bn1.*, |
/// |             |                                                             | layer{1..4}.*,  |
/// |             |                                                             | fc.*            |
///
/// `layers.N` are the names of an nn.Sequential called `layers` whose odd members are ReLUs.
///
/// gpt and resnet18 come in sizes, which stand behind a colon:
/// - gpt:layers=2,heads=2,channels=64,context=64,vocabulary=65,dropout=0.1,bias=0. What is left out
///   is GptOptions' default.
/// - resnet18:classes=10. 1,000 by default, as in torchvision.
///
/// A name with a slash, or one that ends in .pt, .pth or .ts, is a TorchScript file that
/// torch.jit.script(...).save or torch.jit.trace wrote. It is trained from the values that it has,
/// under the names of its state_dict. Its forward takes a tensor and gives one.
///
/// `classes` is how many classes the data has, where the name does not say it: the vocabulary of
/// gpt, the outputs of resnet18. 0: their defaults. Other models have the outputs that they have.
///
/// Throws UsageError with the nearest name for an unknown one, for sizes that do not fit, and for a
/// file that is no TorchScript.
std::shared_ptr<Model> make_model(const std::string& name, int64_t classes = 0);
/// Throws like make_model, but does not look into a file.
ModelInfo model_info(const std::string& name, int64_t classes = 0);
/// Without files and sizes.
std::vector<std::string> model_names();
/// Throws UsageError unless make_model knows the name and its sizes; it does not look for files.
/// `flag` is for the message: "--model".
void check_model_name(const std::string& flag, const std::string& name);

/// The sizes of a GPT. The defaults are nanoGPT's small shape for characters: 10,746,624
/// parameters.
struct GptOptions {
  int64_t vocabulary = 65;  ///< Different tokens. 65: the characters of nanoGPT's Shakespeare.
  int64_t context = 128;   ///< The most tokens that it looks back on. Each has a position's vector.
  int64_t layers = 6;      ///< Blocks of attention and perceptron.
  int64_t heads = 6;       ///< Of each attention; must divide `channels`.
  int64_t channels = 384;  ///< Numbers for each token between the blocks.
  double dropout = 0;  ///< nanoGPT's: 0 for training once over much text, 0.1 and more for less.
  bool bias = true;    ///< In linear layers and norms, as GPT-2. Without it is a little faster.
};

/// A transformer that predicts the next token: nanoGPT's GPT (Karpathy 2022), with its names and
/// its initial values. After torch::manual_seed(S) these are Python's bits. One thing differs: the
/// head has weights of its own, which nanoGPT shares with the token embedding.
///
/// forward takes tokens [B, T], int64 or int32, from 0 to vocabulary - 1, with T from 1 to
/// `context`. It gives [B, T, vocabulary]: at each place the logits of the token that follows. It
/// looks at no later place. Attention is at::scaled_dot_product_attention.
///
/// Throws UsageError for options that check_gpt_options refuses.
std::shared_ptr<Model> make_gpt(const GptOptions& options);

/// Throws UsageError for sizes that are out of range or do not divide.
void check_gpt_options(const GptOptions& options);

}  // namespace lockstep
