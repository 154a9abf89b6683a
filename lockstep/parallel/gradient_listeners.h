#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/autograd/backward_hook.h"

namespace lockstep::detail {

/// Calls back when the gradient of a backward has been added to a parameter: on the thread that
/// runs backward, also for an undefined gradient. Leave them before what they call.
class GradientListeners {
 public:
  GradientListeners() = default;
  ~GradientListeners() {
    for (const auto& [accumulator, key] : hooks_) accumulator->del_post_hook(key);
  }
  GradientListeners(const GradientListeners&) = delete;
  GradientListeners& operator=(const GradientListeners&) = delete;

  void add(const at::Tensor& parameter, std::function<void()> call) {
    // The parameter holds it weakly.
    auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
    const uintptr_t key = accumulator->add_post_hook(std::make_unique<Hook>(std::move(call)));
    hooks_.emplace_back(std::move(accumulator), key);
  }

 private:
  /// A shared pointer, of which kind depends on LibTorch's version.
  using NodePtr =
      decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  using Variables = torch::autograd::variable_list;

  class Hook : public PlainPostHook {
   public:
    explicit Hook(std::function<void()> call) : call_(std::move(call)) {}
    Variables operator()(const Variables& outputs, const Variables&) override {
      call_();
      return outputs;
    }

   private:
    std::function<void()> call_;
  };

  std::vector<std::pair<NodePtr, uintptr_t>> hooks_;
};

}  // namespace lockstep::detail
