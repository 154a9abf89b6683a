#pragma once

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/autograd/activation_checkpoint.h"

namespace lockstep::ddp_test {

/// Values that depend on nothing but `seed`, whatever the threads beside this one draw.
inline at::Tensor values(at::IntArrayRef shape, double seed) {
  return at::arange(c10::multiply_integers(shape), at::kFloat)
      .mul(0.37)
      .add(seed)
      .sin()
      .view(shape);
}

inline void fill(torch::nn::Module& module, double seed) {
  const c10::AutoGradMode no_grad(false);
  for (at::Tensor& parameter : module.parameters()) {
    parameter.copy_(values(parameter.sizes(), seed += 0.7).mul(0.3));
  }
}

struct Net : torch::nn::Module {
  Net() {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::tanh(first(x))); }
  torch::nn::Linear first{6, 5}, second{5, 3};
};

/// Two heads of which a loss may use one.
struct Heads : torch::nn::Module {
  Heads() {
    register_module("body", body);
    register_module("left", left);
    register_module("right", right);
  }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const at::Tensor h = at::tanh(body(x));
    return {left(h), right(h)};
  }
  torch::nn::Linear body{6, 4}, left{4, 1}, right{4, 1};
};

/// Runs one of its heads only.
struct Switch : Heads {
  at::Tensor forward(const at::Tensor& x, bool use_left) {
    const at::Tensor h = at::tanh(body(x));
    return use_left ? left(h) : right(h);
  }
};

/// One checkpointed block several times, and with `outside` once more without a checkpoint.
struct Repeated : torch::nn::Module {
  Repeated() {
    register_module("block", block);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& input, int times) {
    at::Tensor x = outside ? at::tanh(block(input)) : input;
    for (int i = 0; i < times; ++i)
      x = checkpoint([this](const at::Tensor& v) { return at::tanh(block(v)); }, x);
    return head(x);
  }
  bool outside = false;
  torch::nn::Linear block{6, 6}, head{6, 1};
};

struct Counter : torch::nn::Module {
  Counter() {
    register_module("linear", linear);
    seen = register_buffer("seen", at::zeros({2}));
    steps = register_buffer("steps", at::zeros({1}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) { return linear(x) + seen.sum(); }
  torch::nn::Linear linear{6, 1};
  at::Tensor seen, steps;
};

struct Lookup : torch::nn::Module {
  Lookup() {
    register_module("table", table);
    register_module("linear", linear);
  }
  at::Tensor forward(const at::Tensor& rows) { return linear(table(rows)).sum(); }
  torch::nn::Embedding table{torch::nn::EmbeddingOptions(8, 3).sparse(true)};
  torch::nn::Linear linear{3, 1};
};

/// The output layer is the input layer once more.
struct Tied : torch::nn::Module {
  Tied() {
    weight = register_parameter("weight", at::zeros({4, 4}));
    register_parameter("again", weight);
  }
  at::Tensor forward(const at::Tensor& x) {
    return at::matmul(at::tanh(at::matmul(x, weight)), weight);
  }
  at::Tensor weight;
};

struct Answer {
  at::Tensor logits;
  std::map<std::string, at::Tensor> extra;
  int64_t count = 0;
};

struct Rich : torch::nn::Module {
  Rich() {
    register_module("a", a);
    register_module("b", b);
  }
  Answer forward(const std::tuple<at::Tensor, at::Tensor>& inputs, double scale) {
    const auto& [x, y] = inputs;
    return {a(x) * scale, {{"other", b(y)}, {"constant", at::ones({2})}}, 7};
  }
  torch::nn::Linear a{6, 2}, b{6, 2};
};

}  // namespace lockstep::ddp_test
