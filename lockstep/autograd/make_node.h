#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace lockstep {

/// A node that does more than give gradients, such as a backward of its own. It cannot run in two
/// halves.
class RunsOnce {
 public:
  virtual ~RunsOnce() = default;
};

/// A node of the graph, under the kind of shared pointer that this LibTorch's graph has.
template <class Made, class... Arguments>
auto make_node(Arguments&&... arguments) {
  using torch::autograd::Node;
  using Pointer = std::decay_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return std::shared_ptr<Made>(new Made(std::forward<Arguments>(arguments)...),
                                 [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Made>(std::forward<Arguments>(arguments)...);
  }
}

}  // namespace lockstep
