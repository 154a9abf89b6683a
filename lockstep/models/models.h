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
  std::string name;                           ///< The prefix of its tensors' names.
  std::shared_ptr<torch::nn::Module> module;  ///< Null for a layer without tensors (ReLU).
  std::function<at::Tensor(const at::Tensor&)> forward;
};

/// A model of one input and one output, as the trainer and the examples use it.
class Model : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;
  /// `input` is a batch of samples with ModelInfo's dtype and shape; the first dimension is the
  /// batch. If the shape is {784} or {1, 28, 28}, images may be flat ([B, 784]) or not ([B, 1, 28,
  /// 28]). Returns [B, outputs], or [B, T, outputs] with ModelInfo::per_token. Throws UsageError
  /// naming the shape that does not fit. Runs the layers, unless it is overridden.
  virtual at::Tensor forward(at::Tensor input);
  /// The model as a chain of layers. Their forwards, one after the other, give the same bits as
  /// `forward`. The layers keep alive what they need. Empty: the model is not a chain.
  virtual std::vector<ModelLayer> layers() { return {}; }
  /// A model of the same layers, with copies of this model's tensors. Draws random numbers.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override;

 protected:
  /// Makes a model of the same layers, as make_model does for this name. Override it if the name
  /// does not describe the model completely.
  virtual std::shared_ptr<Model> make_again() const;
};

/// What a model expects and returns. With it a mismatch with a dataset is found before training.
struct ModelInfo {
  std::string name = {};
  /// The shape of one sample: {784}, {1, 28, 28}, {20}, {128} tokens. Empty for a TorchScript file,
  /// where it is not known.
  std::vector<int64_t> input_shape = {};
  int64_t outputs = 0;                      ///< 0: not known (a TorchScript file).
  bool regression = false;                  ///< Mean squared error instead of cross-entropy.
  at::ScalarType input_dtype = at::kFloat;  ///< int64 for tokens.
  bool per_token = false;                   ///< A class for each token, not for the whole sample.
  /// Images may have any height and width, not only those of `input_shape`.
  bool any_image_size = false;
  bool from_file = false;  ///< TorchScript: the shapes are known only from a batch.
};

/// Makes a model with newly initialized parameters, in the order in which Python's modules make
/// them. So after torch::manual_seed(S) they have the bits of Python's. Parameter names are those
/// in the state_dict of the same model in Python:
///
/// | name        | what                                                        | names           |
/// |-------------|-------------------------------------------------------------|-----------------|
/// | mlp         | Linear 784-128-64-10 with ReLU between                      | layers.{0,2,4}.*|
/// | convnet     | the tutorial's: two of conv 5x5 (16, 32), batch norm, ReLU, | layer{1,2}.{0,1}|
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
/// gpt and resnet18 take sizes after a colon:
/// - gpt:layers=2,heads=2,channels=64,context=64,vocabulary=65,dropout=0.1,bias=0. What is left out
///   has the default of GptOptions.
/// - resnet18:classes=10. 1,000 by default, as in torchvision.
///
/// A name with a slash, or one that ends in .pt, .pth or .ts, is a TorchScript file that
/// torch.jit.script(...).save or torch.jit.trace wrote. Training starts from the values in the
/// file, under the names of its state_dict. Its forward takes one tensor and returns one.
///
/// `classes` is the number of classes in the data, used if the name does not give it: the
/// vocabulary of gpt, the outputs of resnet18. 0: their defaults. The other models ignore it.
///
/// Throws UsageError for an unknown name (with the nearest one), for sizes that do not fit, and for
/// a file that is not TorchScript.
std::shared_ptr<Model> make_model(const std::string& name, int64_t classes = 0);
/// Throws like make_model, but does not open a file.
ModelInfo model_info(const std::string& name, int64_t classes = 0);
/// The names of the built-in models, without sizes.
std::vector<std::string> model_names();
/// Throws UsageError unless make_model knows the name and its sizes; it does not look for files.
/// `flag` is named in the message: "--model".
void check_model_name(const std::string& flag, const std::string& name);

/// The sizes of a GPT. The defaults are those of nanoGPT's small model for characters: 10,746,624
/// parameters.
struct GptOptions {
  int64_t vocabulary = 65;  ///< Number of distinct tokens. 65: nanoGPT's Shakespeare.
  int64_t context = 128;    ///< Maximum sequence length; one position embedding for each.
  int64_t layers = 6;       ///< Transformer blocks: attention and MLP.
  int64_t heads = 6;        ///< Attention heads of a block; must divide `channels`.
  int64_t channels = 384;   ///< Embedding dimension (nanoGPT's n_embd).
  double dropout = 0;       ///< As nanoGPT advises: 0 for pre-training, 0.1 or more for less text.
  bool bias = true;         ///< In linear layers and norms, as in GPT-2. False is a little faster.
};

/// A transformer that predicts the next token: nanoGPT's GPT (Karpathy 2022), with its parameter
/// names and initial values. After torch::manual_seed(S) these have the bits of Python's. One thing
/// differs: the output head has its own weights, which nanoGPT ties to the token embedding.
///
/// forward takes tokens [B, T], int64 or int32, from 0 to vocabulary - 1, with T from 1 to
/// `context`. It returns [B, T, vocabulary]: at each position the logits of the next token.
/// Attention is causal, by at::scaled_dot_product_attention.
///
/// Throws UsageError for options that check_gpt_options refuses.
std::shared_ptr<Model> make_gpt(const GptOptions& options);

/// Throws UsageError for sizes that are out of range or do not divide.
void check_gpt_options(const GptOptions& options);

}  // namespace lockstep
