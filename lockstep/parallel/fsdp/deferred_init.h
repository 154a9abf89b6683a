#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <utility>

namespace torch::nn {
class Module;
}

namespace lockstep {

namespace detail {

/// Operations that were noted instead of run.
class InitTape;

/// While it lives, this thread's operations give tensors without memory (device meta) and are
/// noted.
class RecordInit {
 public:
  RecordInit();
  ~RecordInit();
  RecordInit(const RecordInit&) = delete;
  RecordInit& operator=(const RecordInit&) = delete;
  /// Ties the tape to the tensors of a module made meanwhile.
  void attach(torch::nn::Module& module) const;

 private:
  std::shared_ptr<InitTape> tape_;
};

bool is_deferred(const at::Tensor& tensor);

/// Runs what was noted, in its order, on the CPU. `made` gets each tensor of the module that is
/// deferred, as soon as its values are complete, with these values. They are freed when it returns.
/// So little more than one of them is there at a time. Tensors that share memory come one after the
/// other. Throws UsageError for a tensor on the meta device of which nothing was noted.
void run_deferred(
    torch::nn::Module& module,
    const std::function<void(const at::Tensor& deferred, const at::Tensor& values)>& made);

}  // namespace detail

/// Makes a module that needs no memory until FullyShardedDataParallel (or the strategy fsdp) shards
/// it. So a model can be made that is larger than one rank's memory:
///
///     auto model = deferred_init([] { return std::make_shared<Gpt>(options); });
///     FullyShardedDataParallel fsdp(model, world.group());
///
/// `make` gives a std::shared_ptr of a module or a ModuleHolder. The operations in it are noted:
/// tensors are made on the meta device. FullyShardedDataParallel runs them, one parameter after the
/// other, on every rank, and keeps its shards of rank 0's values. They have the bits that `make`
/// would have given there: the random numbers are drawn then.
///
/// What `make` does with raw pointers or values (torch::tensor of a list, item(), loading a file)
/// cannot be noted and is LibTorch's error. Such a tensor can be made before, outside of it.
template <class Make>
auto deferred_init(Make&& make) {
  const detail::RecordInit record;
  auto module = std::forward<Make>(make)();
  record.attach(*module);
  return module;
}

}  // namespace lockstep
