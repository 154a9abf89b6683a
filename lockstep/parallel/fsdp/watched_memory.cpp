#include "lockstep/parallel/fsdp/watched_memory.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::detail {

struct WatchedMemory::Watch {
  MemoryWatcher* watcher;  ///< Null once it is gone.
  size_t index;
  at::ScalarType dtype;
  bool converts;
  at::Tensor data = {};
};

namespace {

using Watch = WatchedMemory::Watch;
using c10::DispatchKey;

/// The storage's context holds the watch, also while there is no data.
void let_go(void* context) {
  delete static_cast<std::shared_ptr<Watch>*>(context);
}

c10::DataPtr data_pointer(const std::shared_ptr<Watch>& watch, c10::Device device) {
  void* data = watch->data.defined() ? watch->data.mutable_data_ptr() : nullptr;
  return {data, new std::shared_ptr<Watch>(watch), &let_go, device};
}

Watch* watch_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kWatchKey)) return nullptr;
  const c10::DataPtr& pointer = tensor.unsafeGetTensorImpl()
                                    ->unsafe_storage()
                                    .unsafeGetStorageImpl()
                                    ->_mutable_data_ptr_no_checks();
  if (pointer.get_deleter() != &let_go) return nullptr;
  return static_cast<std::shared_ptr<Watch>*>(pointer.get_context())->get();
}

/// A raw pointer into memory that is not there becomes an error that says so, where LibTorch is new
/// enough for it.
template <class Impl>
void forbid_pointers(Impl& storage, bool forbid) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    if (forbid) {
      storage.release_data_and_set_meta_custom_data_ptr_error_msg_(
          "a raw pointer into a parameter of FullyShardedDataParallel was asked for while its "
          "values "
          "lie in shards; they are whole within operations, and under full_parameters()");
    } else {
      storage.clear_data_ptr_access_error_msg_();
    }
  }
}

/// Changes no values.
bool leaves_values(const c10::OperatorHandle& operation) {
  if (operation.hasTag(at::Tag::inplace_view)) return true;
  const std::string& name = operation.operator_name().name;
  return name == "aten::requires_grad_" || name == "aten::set_data" || name == "aten::detach_";
}

/// The watched memories among an operation's arguments.
struct Uses {
  MemoryWatcher* watcher = nullptr;
  std::vector<size_t> memories;
  std::optional<size_t> written;
  std::optional<at::ScalarType> dtype;  ///< To which other arguments are converted.

  Uses(const c10::OperatorHandle& operation, const torch::jit::Stack& stack) {
    const auto& arguments = operation.schema().arguments();
    const size_t first = stack.size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const c10::AliasInfo* alias = arguments[i].alias_info();
      add(stack[first + i], alias != nullptr && alias->isWrite());
    }
  }

  void add(const c10::IValue& value, bool is_written) {
    if (value.isTensor()) {
      add(value.toTensor(), is_written);
    } else if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) {
        if (!item.isTensor() && !item.isNone()) return;
        if (item.isTensor()) add(item.toTensor(), is_written);
      }
    }
  }

  void add(const at::Tensor& tensor, bool is_written) {
    Watch* const watch = watch_of(tensor);
    if (watch == nullptr) return;
    if (watch->watcher == nullptr) {
      if (watch->data.defined()) return;
      throw UsageError(
          "a parameter is used whose FullyShardedDataParallel is gone: its values lie in shards",
          "keep the FullyShardedDataParallel for as long as its module is used");
    }
    if (watcher != nullptr && watcher != watch->watcher) {
      throw UsageError(
          "an operation takes parameters of two FullyShardedDataParallel modules at once",
          "clone one of them first, or shard both modules as one");
    }
    watcher = watch->watcher;
    if (watch->converts) dtype = watch->dtype;
    if (std::find(memories.begin(), memories.end(), watch->index) == memories.end())
      memories.push_back(watch->index);
    if (is_written) written = watch->index;
  }
};

/// What the module computes in is what its parameters are in.
void convert(const c10::OperatorHandle& operation, torch::jit::Stack& stack, at::ScalarType dtype) {
  const auto& arguments = operation.schema().arguments();
  const size_t first = stack.size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = stack[first + i];
    if (!value.isTensor() || arguments[i].alias_info() != nullptr) continue;
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || !at::isFloatingType(tensor.scalar_type())) continue;
    if (tensor.scalar_type() != dtype) value = tensor.to(dtype);
  }
}

void run_watched(const c10::OperatorHandle& operation, c10::DispatchKeySet,
                 torch::jit::Stack* stack) {
  const Uses uses(operation, *stack);
  const Unwatched unwatched;
  if (uses.watcher == nullptr) return operation.callBoxed(stack);
  if (uses.written && !leaves_values(operation))
    uses.watcher->before_write(*uses.written, operation.operator_name().name);
  uses.watcher->before_use(uses.memories);
  const auto after = c10::make_scope_exit([&] { uses.watcher->after_use(); });
  if (uses.dtype) convert(operation, *stack, *uses.dtype);
  operation.callBoxed(stack);
}

/// Made with the first watched memory: the table of all operations is computed anew for it, which
/// other programs need not wait for.
void register_watched_kernel() {
  static const torch::Library library = [] {
    torch::Library made(torch::Library::IMPL, "_", kWatchKey, __FILE__, __LINE__);
    made.fallback(torch::CppFunction::makeFromBoxedFunction<&run_watched>());
    return made;
  }();
}

}  // namespace

WatchedMemory::WatchedMemory(MemoryWatcher& watcher, size_t index, int64_t elements,
                             at::ScalarType dtype, c10::Device device, bool converts)
    : watch_(std::make_shared<Watch>(Watch{&watcher, index, dtype, converts})) {
  register_watched_kernel();
  const auto type = c10::scalarTypeToTypeMeta(dtype);
  const auto bytes = elements * static_cast<int64_t>(type.itemsize());
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, data_pointer(watch_, device), nullptr,
      /*resizable=*/false));
  const auto backend = device.is_cpu() ? DispatchKey::CPU : DispatchKey::CUDA;
  tensor_ = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(backend).add(kWatchKey), type);
  tensor_.unsafeGetTensorImpl()->set_sizes_contiguous({elements});
  take();
}

WatchedMemory::~WatchedMemory() {
  if (!watch_) return;
  watch_->watcher = nullptr;
  // As of a storage that was resized to 0: whatever wraps the module next gives it memory.
  if (!is_there()) tensor_.storage().set_nbytes(0);
}

WatchedMemory::WatchedMemory(WatchedMemory&&) noexcept = default;

void WatchedMemory::put(const at::Tensor& data) {
  watch_->data = data;
  c10::StorageImpl& storage = *tensor_.storage().unsafeGetStorageImpl();
  storage.set_data_ptr_noswap(data_pointer(watch_, tensor_.device()));
  forbid_pointers(storage, !data.defined());
}

void WatchedMemory::take() {
  put({});
}

bool WatchedMemory::is_there() const {
  return watch_->data.defined();
}

}  // namespace lockstep::detail
