#include "lockstep/models/models.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <string>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

namespace nn = torch::nn;

/// GPT-2's, before the scale of the layers that end in a residual sum.
constexpr double kInitialDeviation = 0.02;

nn::Linear make_linear(int64_t in, int64_t out, bool bias) {
  return nn::Linear(nn::LinearOptions(in, out).bias(bias));
}

/// With or without a bias, which nn::LayerNorm always has.
class LayerNorm : public nn::Module {
 public:
  LayerNorm(int64_t channels, bool bias)
      : weight_(register_parameter("weight", at::ones({channels}))) {
    if (bias) bias_ = register_parameter("bias", at::zeros({channels}));
  }

  at::Tensor forward(const at::Tensor& x) const {
    return at::layer_norm(x, weight_.sizes(), weight_, bias_, /*eps=*/1e-5);
  }

 private:
  at::Tensor weight_;
  at::Tensor bias_;
};

class Attention : public nn::Module {
 public:
  explicit Attention(const GptOptions& options)
      : c_attn_(register_module("c_attn",
                                make_linear(options.channels, 3 * options.channels, options.bias))),
        c_proj_(register_module("c_proj",
                                make_linear(options.channels, options.channels, options.bias))),
        heads_(options.heads),
        dropout_(options.dropout) {}

  at::Tensor forward(const at::Tensor& x) {
    const int64_t batch = x.size(0), tokens = x.size(1), channels = x.size(2);
    const auto parts = c_attn_->forward(x).split(channels, /*dim=*/2);
    const auto by_head = [&](const at::Tensor& part) {
      return part.view({batch, tokens, heads_, channels / heads_}).transpose(1, 2);
    };
    const at::Tensor y = at::scaled_dot_product_attention(
        by_head(parts[0]), by_head(parts[1]), by_head(parts[2]), /*attn_mask=*/{},
        is_training() ? dropout_ : 0.0, /*is_causal=*/true);
    const at::Tensor joined = y.transpose(1, 2).contiguous().view({batch, tokens, channels});
    return at::dropout(c_proj_->forward(joined), dropout_, is_training());
  }

 private:
  nn::Linear c_attn_;
  nn::Linear c_proj_;
  int64_t heads_;
  double dropout_;
};

class FeedForward : public nn::Module {
 public:
  explicit FeedForward(const GptOptions& options)
      : c_fc_(register_module("c_fc",
                              make_linear(options.channels, 4 * options.channels, options.bias))),
        c_proj_(register_module("c_proj",
                                make_linear(4 * options.channels, options.channels, options.bias))),
        dropout_(options.dropout) {}

  at::Tensor forward(const at::Tensor& x) {
    return at::dropout(c_proj_->forward(at::gelu(c_fc_->forward(x))), dropout_, is_training());
  }

 private:
  nn::Linear c_fc_;
  nn::Linear c_proj_;
  double dropout_;
};

class Block : public nn::Module {
 public:
  explicit Block(const GptOptions& options)
      : ln_1_(register_module("ln_1", std::make_shared<LayerNorm>(options.channels, options.bias))),
        attn_(register_module("attn", std::make_shared<Attention>(options))),
        ln_2_(register_module("ln_2", std::make_shared<LayerNorm>(options.channels, options.bias))),
        mlp_(register_module("mlp", std::make_shared<FeedForward>(options))) {}

  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor x = input + attn_->forward(ln_1_->forward(input));
    return x + mlp_->forward(ln_2_->forward(x));
  }

 private:
  std::shared_ptr<LayerNorm> ln_1_;
  std::shared_ptr<Attention> attn_;
  std::shared_ptr<LayerNorm> ln_2_;
  std::shared_ptr<FeedForward> mlp_;
};

/// The vectors of tokens and of their places.
class Embedding : public nn::Module {
 public:
  explicit Embedding(const GptOptions& options)
      : wte(register_module("wte", nn::Embedding(options.vocabulary, options.channels))),
        wpe(register_module("wpe", nn::Embedding(options.context, options.channels))),
        drop(register_module("drop", nn::Dropout(options.dropout))) {}

  at::Tensor forward(const at::Tensor& tokens) {
    const at::Tensor places = at::arange(tokens.size(1), tokens.options().dtype(at::kLong));
    return drop->forward(wte->forward(tokens) + wpe->forward(places));
  }

  nn::Embedding wte;
  nn::Embedding wpe;
  nn::Dropout drop;
};

/// The last norm and the logits.
class Head : public nn::Module {
 public:
  explicit Head(const GptOptions& options)
      : ln_f(std::make_shared<LayerNorm>(options.channels, options.bias)),
        lm_head(register_module(
            "lm_head", make_linear(options.channels, options.vocabulary, /*bias=*/false))) {
    // Under the names that they have in the whole model.
    register_module("transformer", std::make_shared<nn::Module>("transformer"))
        ->register_module("ln_f", ln_f);
  }

  at::Tensor forward(const at::Tensor& x) { return lm_head->forward(ln_f->forward(x)); }

  std::shared_ptr<LayerNorm> ln_f;
  nn::Linear lm_head;
};

class Gpt : public Model {
 public:
  explicit Gpt(const GptOptions& options) : Model("gpt"), options_(options) {
    // In the order in which nanoGPT's modules draw their first values, which then are replaced.
    embedding_ = std::make_shared<Embedding>(options);
    auto list = std::make_shared<nn::Module>("h");
    for (int64_t i = 0; i < options.layers; ++i) {
      blocks_.push_back(list->register_module(std::to_string(i), std::make_shared<Block>(options)));
    }
    head_ = std::make_shared<Head>(options);
    auto transformer = register_module("transformer", std::make_shared<nn::Module>("transformer"));
    transformer->register_module("wte", embedding_->wte);
    transformer->register_module("wpe", embedding_->wpe);
    transformer->register_module("drop", embedding_->drop);
    transformer->register_module("h", list);
    transformer->register_module("ln_f", head_->ln_f);
    register_module("lm_head", head_->lm_head);
    draw_initial_values();
  }

  std::vector<ModelLayer> layers() override {
    const auto self = std::static_pointer_cast<Gpt>(shared_from_this());
    std::vector<ModelLayer> chain{{"transformer", embedding_, [self](const at::Tensor& tokens) {
                                     self->check_input(tokens);
                                     return self->embedding_->forward(tokens);
                                   }}};
    for (const auto& block : blocks_) {
      const std::string name = "transformer.h." + std::to_string(chain.size() - 1);
      chain.push_back({name, block, [block](const at::Tensor& x) { return block->forward(x); }});
    }
    const auto head = head_;
    chain.push_back({"", head, [head](const at::Tensor& x) { return head->forward(x); }});
    return chain;
  }

 protected:
  std::shared_ptr<Model> make_again() const override { return make_gpt(options_); }

 private:
  void check_input(const at::Tensor& input) const {
    const bool tokens = input.scalar_type() == at::kLong || input.scalar_type() == at::kInt;
    if (tokens && input.dim() == 2 && input.size(1) >= 1 && input.size(1) <= options_.context) {
      return;
    }
    throw UsageError("model gpt: the input has shape " + c10::str(input.sizes()) + " of " +
                     c10::toString(input.scalar_type()) + ", expected tokens [batch, 1 to " +
                     std::to_string(options_.context) + "] of Long or Int");
  }

  /// nanoGPT's: all modules in their order, then the weights before residual sums once more.
  void draw_initial_values() {
    const at::NoGradGuard no_grad;
    for (const auto& module : modules(/*include_self=*/false)) {
      if (auto* embedding = module->as<nn::Embedding>())
        embedding->weight.normal_(0, kInitialDeviation);
      auto* linear = module->as<nn::Linear>();
      if (!linear) continue;
      linear->weight.normal_(0, kInitialDeviation);
      if (linear->bias.defined()) linear->bias.zero_();
    }
    const double residual = kInitialDeviation / std::sqrt(2 * static_cast<double>(options_.layers));
    for (auto& item : named_parameters()) {
      if (item.key().ends_with("c_proj.weight")) item.value().normal_(0, residual);
    }
  }

  GptOptions options_;
  std::shared_ptr<Embedding> embedding_;  ///< Its parts are registered as nanoGPT names them.
  std::vector<std::shared_ptr<Block>> blocks_;
  std::shared_ptr<Head> head_;  ///< Likewise.
};

}  // namespace

void check_gpt_options(const GptOptions& options) {
  const auto at_least_one = [](const char* name, int64_t value) {
    if (value < 1) {
      throw UsageError(std::string("model gpt: ") + name + " is " + std::to_string(value) +
                       "; expected at least 1");
    }
  };
  at_least_one("vocabulary", options.vocabulary);
  at_least_one("context", options.context);
  at_least_one("layers", options.layers);
  at_least_one("heads", options.heads);
  at_least_one("channels", options.channels);
  if (options.channels % options.heads != 0) {
    throw UsageError("model gpt: " + std::to_string(options.channels) +
                         " channels cannot be shared by " + std::to_string(options.heads) +
                         " heads; expected a multiple",
                     "give as many channels as heads times a size of each, 64 say");
  }
  if (!(options.dropout >= 0 && options.dropout < 1)) {
    throw UsageError("model gpt: dropout is " + std::to_string(options.dropout) +
                     "; expected at least 0 and less than 1");
  }
}

std::shared_ptr<Model> make_gpt(const GptOptions& options) {
  check_gpt_options(options);
  return std::make_shared<Gpt>(options);
}

}  // namespace lockstep
