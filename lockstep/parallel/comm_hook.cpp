#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "lockstep/base/error.h"
#include "lockstep/parallel/comm_hook.h"

namespace lockstep::detail {
namespace {

using Future = c10::ivalue::Future;

/// Sends the gradients as bfloat16. (LibTorch has this for fp16 only.)
class Bf16Hook : public c10d::CppCommHookInterface<ProcessGroup> {
 public:
  using CppCommHookInterface::CppCommHookInterface;

  c10::intrusive_ptr<Future> runHook(c10d::GradBucket& bucket) override {
    c10d::ProcessGroup& group = state_.native();
    // Divided first, as in Python, so that the sum does not overflow.
    std::vector<at::Tensor> compressed{
        bucket.getBuffer().to(at::kBFloat16).div_(static_cast<double>(state_.size()))};
    const at::Tensor& wide = bucket.getBuffer();
    auto narrow = compressed.front();
    return group.allreduce(compressed)
        ->getFuture()
        ->then(
            [wide, narrow](Future& future) {
              if (future.hasError()) std::rethrow_exception(future.exception_ptr());
              wide.copy_(narrow);
              return c10::IValue(wide);
            },
            c10::TensorType::get());
  }
};

/// The user's own hook. The future that the reducer gets is complete at once and holds only the
/// bucket's number; the hook's second part runs when the reducer asks for the result.
class UserHook : public c10d::CommHookInterface {
 public:
  UserHook(ProcessGroup group, AsyncGradientHook hook)
      : group_(std::move(group)), hook_(std::move(hook)) {}

  c10::intrusive_ptr<Future> runHook(c10d::GradBucket& bucket) override {
    GradientBucket ours{bucket.getBuffer(), bucket.getParameters(), bucket.getIndex(),
                        bucket.isLast()};
    if (pending_.size() <= ours.index) pending_.resize(ours.index + 1);
    pending_[ours.index] = {bucket.getBuffer(), hook_(group_, ours)};
    auto future = c10::make_intrusive<Future>(c10::IntType::get());
    future->markCompleted(c10::IValue(static_cast<int64_t>(ours.index)));
    return future;
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    Pending pending = std::move(pending_.at(result.toInt()));
    at::Tensor gradients = pending.finish();
    if (!gradients.defined() || gradients.sizes() != pending.local.sizes() ||
        gradients.scalar_type() != pending.local.scalar_type()) {
      throw UsageError("a gradient hook returned " +
                       (gradients.defined() ? std::string(gradients.toString()) + " of " +
                                                  std::to_string(gradients.numel()) + " elements"
                                            : std::string("no tensor")) +
                       ", expected the bucket's " + std::string(pending.local.toString()) + " of " +
                       std::to_string(pending.local.numel()) + " elements, one dimension");
    }
    return gradients.contiguous();
  }

 private:
  struct Pending {
    at::Tensor local;
    std::function<at::Tensor()> finish;
  };
  ProcessGroup group_;
  AsyncGradientHook hook_;
  std::vector<Pending> pending_;  ///< By the bucket's index.
};

AsyncGradientHook as_async(GradientHook hook) {
  return [hook = std::move(hook)](const ProcessGroup& group, GradientBucket& bucket) {
    return [result = hook(group, bucket)] { return result; };
  };
}

}  // namespace

void register_hook(c10d::Reducer& reducer, const ProcessGroup& group, const DdpOptions& options) {
  if (options.async_custom_hook || options.custom_hook) {
    reducer.register_comm_hook(std::make_unique<UserHook>(
        group,
        options.async_custom_hook ? options.async_custom_hook : as_async(options.custom_hook)));
    return;
  }
  switch (options.comm_hook) {
    case CommHook::none:
      return;
    case CommHook::allreduce:
      reducer.register_builtin_comm_hook(c10d::BuiltinCommHookType::ALLREDUCE);
      return;
    case CommHook::fp16_compress:
      reducer.register_builtin_comm_hook(c10d::BuiltinCommHookType::FP16_COMPRESS);
      return;
    case CommHook::bf16_compress:
      reducer.register_comm_hook(std::make_unique<Bf16Hook>(group));
      return;
  }
}

}  // namespace lockstep::detail
