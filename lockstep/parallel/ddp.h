#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/output_tensors.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

/// What is done to a bucket of gradients before or instead of the all-reduce; Python's names.
enum class CommHook { none, allreduce, fp16_compress, bf16_compress };

/// The user's own hook: gets a bucket's flat gradients (one dimension), returns what they become on
/// all ranks (the mean over ranks, for DDP's meaning). Runs on autograd's thread, once a bucket.
using GradientHook = std::function<at::Tensor(const ProcessGroup& group, at::Tensor bucket)>;

/// Python's DistributedDataParallel options, with its defaults unless a line says otherwise.
struct DdpOptions {
  double bucket_cap_mb = 25;            ///< Gradients per all-reduce, in MiB.
  double first_bucket_mb = 1;           ///< A small first one starts communication early.
  bool find_unused_parameters = false;  ///< Walk the graph for parameters without a gradient.
  bool static_graph = false;            ///< The graph never changes: cheaper, allows re-entrance.
  /// Gradients are views of the buckets, which saves a copy a step; Python's default is false.
  bool gradient_as_bucket_view = true;
  bool broadcast_buffers = true;  ///< Rank 0's buffers go to all ranks before each forward.
  CommHook comm_hook = CommHook::none;
  GradientHook custom_hook;  ///< Wins over `comm_hook`.
};

/// What happened in the last steps.
struct DdpStatistics {
  int64_t iterations = 0;          ///< Synchronised backward passes.
  int64_t parameters = 0;          ///< Elements with a gradient.
  std::vector<int64_t> bucket_bytes;  ///< As they are now (they are rebuilt after the first step).
  bool buckets_rebuilt = false;
};

namespace detail {

/// The part of DistributedDataParallel that does not depend on the module's type.
class DdpCore {
 public:
  DdpCore(torch::nn::Module& module, ProcessGroup group, const DdpOptions& options);
  ~DdpCore();
  DdpCore(const DdpCore&) = delete;
  DdpCore& operator=(const DdpCore&) = delete;

  void before_forward();
  void after_forward(const std::vector<at::Tensor>& outputs);
  bool synchronizing() const { return synchronizing_; }
  void set_synchronizing(bool on) { synchronizing_ = on; }
  DdpStatistics statistics() const;
  const ProcessGroup& group() const { return group_; }

 private:
  struct Impl;
  ProcessGroup group_;
  bool synchronizing_ = true;
  std::unique_ptr<Impl> impl_;
};

}  // namespace detail

/// Data parallelism over processes, as torch.nn.parallel.DistributedDataParallel: every rank has the
/// whole model and a share of each batch; gradients are averaged over ranks while backward runs (by
/// c10d::Reducer: Li et al., "PyTorch Distributed", VLDB 2020).
///
/// `ModulePtr` is a std::shared_ptr of a module or a torch ModuleHolder. The constructor checks that
/// all ranks have the same parameters (MismatchError names the first that differs), and broadcasts
/// rank 0's parameters and buffers. The wrapper works on the module's own parameters: give those to
/// the optimizer. One thread at a time. Outputs may be a tensor, a tuple, a vector, a map, or any
/// type for which `lockstep::OutputTensors` is specialised.
///
/// Reset gradients with `zero_grad(parameters)` of lockstep/optim, or Optimizer::zero_grad with
/// `gradient_as_bucket_view = false`.
template <class ModulePtr>
class DistributedDataParallel {
 public:
  DistributedDataParallel(ModulePtr module, const ProcessGroup& group,
                          const DdpOptions& options = {})
      : module_(std::move(module)), core_(std::make_unique<detail::DdpCore>(*module_, group, options)) {}

  template <class... Args>
  auto forward(Args&&... args) {
    core_->before_forward();
    auto output = module_->forward(std::forward<Args>(args)...);
    core_->after_forward(output_tensors(output));
    return output;
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// While the guard lives, backward only accumulates gradients locally; the first backward after it
  /// averages the sum.
  class NoSync {
   public:
    explicit NoSync(detail::DdpCore& core) : core_(core), before_(core.synchronizing()) {
      core_.set_synchronizing(false);
    }
    ~NoSync() { core_.set_synchronizing(before_); }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    detail::DdpCore& core_;
    bool before_;
  };
  [[nodiscard]] NoSync no_sync() { return NoSync(*core_); }

  /// The wrapped module: what to save, without any prefix in its names.
  auto& module() { return *module_; }
  DdpStatistics statistics() const { return core_->statistics(); }

 private:
  ModulePtr module_;
  std::unique_ptr<detail::DdpCore> core_;
};

}  // namespace lockstep
