#pragma once

#include <torch/csrc/autograd/function_hook.h>

#include <functional>

namespace lockstep {

/// A hook after a node that asks nothing of LibTorch's engine (no Engine::queue_callback), so that
/// `backward` may call it without one.
class PlainPostHook : public torch::autograd::FunctionPostHook {};

/// Runs `callback` when the backward of this thread that is under way has run all of its nodes,
/// before it returns to its caller. What it throws leaves backward. It is dropped where backward
/// fails. For hooks: throws where no backward is under way.
void after_backward(std::function<void()> callback);

}  // namespace lockstep
