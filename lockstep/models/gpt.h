#pragma once

#include <cstdint>
#include <memory>

#include "lockstep/models/models.h"

namespace lockstep {

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
