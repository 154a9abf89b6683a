#pragma once

#include <torch/csrc/autograd/function_hook.h>

namespace lockstep {

/// A hook after a node that asks nothing of LibTorch's engine (no Engine::queue_callback), so that
/// `backward` may call it without one.
class PlainPostHook : public torch::autograd::FunctionPostHook {};

}  // namespace lockstep
