#include "lockstep/parallel/fsdp/fsdp.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep::detail {
namespace {

using c10::DispatchKey;
using torch::jit::Stack;

/// A key that LibTorch keeps free for this. It is on in a thread, not in a tensor.
constexpr DispatchKey kKey = DispatchKey::DeferredInit;

/// An operation with its arguments as they were. Tensors without memory stand for those to come.
struct Noted {
  c10::OperatorHandle operation;
  Stack arguments;
  std::vector<at::Tensor> results;
};

/// Calls `f` with each tensor of a value.
template <class F>
void each_tensor(const c10::IValue& value, const F& f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) each_tensor(item, f);
  }
}

/// A value in which `f` has replaced each tensor.
template <class F>
c10::IValue mapped(const c10::IValue& value, const F& f) {
  if (value.isTensor()) return value.toTensor().defined() ? f(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& item : value.toTensorVector()) list.push_back(f(item));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const c10::IValue& item : value.toListRef())
      list.push_back(item.isNone() ? std::nullopt : std::optional<at::Tensor>(f(item.toTensor())));
    return list;
  }
  return value;
}

/// Its shape and place as they are now, whatever becomes of the tensor.
at::Tensor frozen(const at::Tensor& tensor) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      /*version_counter=*/0, /*allow_tensor_metadata_change=*/false));
}

const void* memory_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

}  // namespace

class InitTape {
 public:
  std::vector<Noted> all;
};

namespace {

/// Ties a module's tensor to the tape.
struct OnTape : c10::BackendMeta {
  explicit OnTape(std::shared_ptr<InitTape> its) : tape(std::move(its)) {}
  std::shared_ptr<InitTape> tape;
};

thread_local InitTape* recording = nullptr;

bool sets_metadata_only(const std::string& name) {
  return name == "aten::requires_grad_" || name == "aten::set_data" || name == "aten::detach_";
}

void record_operation(const c10::OperatorHandle& operation, c10::DispatchKeySet, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard unrecorded(kKey);
  if (recording == nullptr) return operation.callBoxed(stack);
  const auto& arguments = operation.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  Stack before;
  bool is_deferred = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    each_tensor(value, [&](const at::Tensor& tensor) { is_deferred |= tensor.is_meta(); });
    before.push_back(mapped(value, [](const at::Tensor& tensor) {
      return tensor.is_meta() ? frozen(tensor) : tensor;
    }));
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() != "device") continue;
    c10::IValue& device = (*stack)[first + i];
    const bool makes_one = device.isNone() ? !is_deferred : device.toDevice().is_cpu();
    if (!makes_one) continue;
    device = c10::Device(c10::kMeta);
    is_deferred = true;
    // A made tensor is to lie on the CPU when it is made.
    if (before[i].isNone()) before[i] = c10::Device(c10::kCPU);
  }
  operation.callBoxed(stack);
  if (!is_deferred || sets_metadata_only(operation.operator_name().name)) return;
  Noted& noted = recording->all.emplace_back(Noted{operation, std::move(before), {}});
  for (size_t i = stack->size() - operation.schema().returns().size(); i < stack->size(); ++i)
    each_tensor((*stack)[i], [&](const at::Tensor& tensor) {
      if (tensor.is_meta()) noted.results.push_back(frozen(tensor));
    });
}

void register_kernel() {
  static const torch::Library library = [] {
    torch::Library made(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    made.fallback(torch::CppFunction::makeFromBoxedFunction<&record_operation>());
    return made;
  }();
}

/// Calls `f` with each memory of the tape that the operation touches.
template <class F>
void each_memory(const Noted& noted, const F& f) {
  const auto touch = [&f](const at::Tensor& tensor) {
    if (tensor.is_meta()) f(memory_of(tensor));
  };
  for (const c10::IValue& argument : noted.arguments) each_tensor(argument, touch);
  for (const at::Tensor& result : noted.results) touch(result);
}

/// Real memory for the tape's.
class Replay {
 public:
  /// The real tensor for a noted one: the same part of its real memory.
  at::Tensor real(const at::Tensor& noted) {
    if (!noted.is_meta()) return noted;
    const auto found = memories_.find(memory_of(noted));
    TORCH_CHECK(found != memories_.end(), "a tensor was used before it was made");
    return found->second.as_strided(noted.sizes(), noted.strides(), noted.storage_offset());
  }
  void run(const Noted& noted) {
    Stack stack;
    for (const c10::IValue& argument : noted.arguments)
      stack.push_back(mapped(argument, [this](const at::Tensor& tensor) { return real(tensor); }));
    noted.operation.callBoxed(stack);
    size_t next = 0;
    for (const c10::IValue& value : stack) {
      each_tensor(value, [&](const at::Tensor& tensor) {
        if (next < noted.results.size())
          memories_.emplace(memory_of(noted.results[next++]), tensor);
      });
    }
  }
  void forget(const void* memory) { memories_.erase(memory); }

 private:
  std::unordered_map<const void*, at::Tensor> memories_;
};

std::vector<at::Tensor> tensors_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  std::erase_if(tensors, [](const at::Tensor& tensor) { return !is_deferred(tensor); });
  return tensors;
}

}  // namespace

RecordInit::RecordInit() : tape_(std::make_shared<InitTape>()) {
  if (recording != nullptr)
    throw UsageError("deferred_init within deferred_init", "use the outer one only");
  register_kernel();
  recording = tape_.get();
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

RecordInit::~RecordInit() {
  c10::impl::tls_set_dispatch_key_included(kKey, false);
  recording = nullptr;
}

void RecordInit::attach(torch::nn::Module& module) const {
  for (const at::Tensor& tensor : tensors_of(module))
    tensor.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<OnTape>(tape_));
}

bool is_deferred(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_meta();
}

void run_deferred(
    torch::nn::Module& module,
    const std::function<void(const at::Tensor& deferred, const at::Tensor& values)>& made) {
  const c10::AutoGradMode no_grad(false);
  const std::vector<at::Tensor> tensors = tensors_of(module);
  std::vector<std::shared_ptr<InitTape>> tapes;
  std::unordered_map<const void*, std::vector<at::Tensor>> wanted;
  for (const at::Tensor& tensor : tensors) {
    const auto meta = tensor.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr();
    const auto* tied = dynamic_cast<const OnTape*>(meta.get());
    if (tied == nullptr)
      throw UsageError(
          "a parameter of the module is on the meta device, and nothing says what its "
          "values are",
          "make the module under lockstep::deferred_init");
    if (std::ranges::find(tapes, tied->tape) == tapes.end()) tapes.push_back(tied->tape);
    wanted[memory_of(tensor)].push_back(tensor);
  }
  for (const auto& tape : tapes) {
    // The last operation that touches a memory completes it. Ranks go through them in one order.
    std::unordered_map<const void*, size_t> last;
    for (size_t i = 0; i < tape->all.size(); ++i)
      each_memory(tape->all[i], [&](const void* memory) { last[memory] = i; });
    Replay replay;
    for (size_t i = 0; i < tape->all.size(); ++i) {
      replay.run(tape->all[i]);
      each_memory(tape->all[i], [&](const void* memory) {
        if (last.at(memory) != i) return;
        last[memory] = tape->all.size();  // It may come twice in one operation.
        for (const at::Tensor& tensor : wanted[memory]) {
          const at::Tensor values = replay.real(tensor);
          tensor.unsafeGetTensorImpl()->set_backend_meta(nullptr);
          made(tensor, values);
        }
        replay.forget(memory);
      });
    }
  }
}

}  // namespace lockstep::detail
