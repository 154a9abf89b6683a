#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::detail {

/// Is told of every operation on tensors that lie in watched memory. One thread at a time.
class MemoryWatcher {
 public:
  virtual ~MemoryWatcher() = default;
  /// Before an operation. `memories` are those in which its arguments lie, each once. When this
  /// returns, all of them have their values. What it throws leaves the operation.
  virtual void before_use(const std::vector<size_t>& memories) = 0;
  /// After it, also where it threw.
  virtual void after_use() noexcept {}
  /// Before an operation that would write to the memory. Throws where that would be lost.
  virtual void before_write(size_t memory, const std::string& operation) {}
};

/// Memory of tensors that an operation can find empty, and that is then filled before it runs.
///
/// Modules of LibTorch have no hooks before forward, and forward of a child is no virtual function.
/// So no wrapper can know when a module's parameters are about to be used. It need not: a tensor of
/// this memory carries one more dispatch key, which comes before autograd's and all others. Its
/// kernel, one for all operations, tells the watcher, and goes on with the operation without the
/// key. (LibTorch resolves lazy conjugation in the same way.) Views inherit the key, and what
/// autograd saves for backward is such a view. So forward and backward of any module work without
/// a change, also TorchScript and recomputation. It costs about a microsecond per operation.
///
/// A raw pointer into a tensor (data_ptr) is no operation. Asking for one while the memory is empty
/// is an error of LibTorch's (c10::Error) that says so.
class WatchedMemory {
 public:
  /// `watcher` is told of uses of memory number `index`. With `converts` other arguments of an
  /// operation that are floating-point numbers of another dtype are converted to this one's.
  WatchedMemory(MemoryWatcher& watcher, size_t index, int64_t elements, at::ScalarType dtype,
                c10::Device device, bool converts = false);
  /// Tensors may outlive this. What is in their memory then stays there.
  ~WatchedMemory();
  WatchedMemory(WatchedMemory&&) noexcept;
  WatchedMemory& operator=(WatchedMemory&&) = delete;

  /// All of it, [elements].
  const at::Tensor& tensor() const { return tensor_; }
  /// From now on the memory is that of `data`, contiguous and of the same size.
  void put(const at::Tensor& data);
  /// From now on there is none.
  void take();
  bool is_there() const;

  /// What the key's kernel knows.
  struct Watch;

 private:
  std::shared_ptr<Watch> watch_;
  at::Tensor tensor_;
};

/// A key that LibTorch keeps free for others' wrappers. It comes before those of autograd, autocast
/// and functorch.
inline constexpr auto kWatchKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

/// While it lives, operations of this thread are not watched.
class Unwatched {
  c10::impl::ExcludeDispatchKeyGuard guard_{kWatchKey};
};

}  // namespace lockstep::detail
