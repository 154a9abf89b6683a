#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/wrapped_module.h"

namespace lockstep {

/// While it lives, every batch norm that this thread runs in training mode takes the mean and
/// variance of all ranks' batches: at::batch_norm itself is replaced, whichever module calls it.
/// Instance norms stay as they are. LibTorch's modules refuse a rank's batch of one value per
/// channel before that; a SyncBatchNorm counts the values of all ranks. All ranks must run the same
/// ones in the same order, forward and backward. Guards nest; a null group, or one of one rank,
/// changes nothing.
class SyncBatchNormGuard {
 public:
  explicit SyncBatchNormGuard(ProcessGroup group);
  ~SyncBatchNormGuard();
  SyncBatchNormGuard(const SyncBatchNormGuard&) = delete;
  SyncBatchNormGuard& operator=(const SyncBatchNormGuard&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Batch norm over the batches of all ranks of a group, as torch.nn.SyncBatchNorm, on every device.
/// (Python's refuses the CPU.) Inputs are [N, C, ...]; ranks may have different N, or none. Tensors
/// have the names of BatchNorm*d. In evaluation mode, and without a group, it is plain batch norm.
/// Inputs of 16 bits may have weights and running statistics of 16 bits or of float32.
///
/// Equal to plain batch norm over the ranks' joined batches, up to rounding: sums over a rank's
/// values are joined in double. Double backward is not supported. Forward and backward are
/// collectives, a gather of 2C + 1 and an all-reduce of 2C numbers: every rank must run backward.
/// With DistributedDataParallel gradients of weight and bias are right, as they are averaged there.
class SyncBatchNormImpl : public torch::nn::BatchNormImplBase<2, SyncBatchNormImpl> {
 public:
  using Base = torch::nn::BatchNormImplBase<2, SyncBatchNormImpl>;
  explicit SyncBatchNormImpl(int64_t num_features, ProcessGroup group = {})
      : SyncBatchNormImpl(torch::nn::BatchNormOptions(num_features), std::move(group)) {}
  explicit SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, ProcessGroup group = {})
      : Base(options), group_(std::move(group)) {}

  at::Tensor forward(const at::Tensor& input);
  const ProcessGroup& group() const { return group_; }

 protected:
  void _check_input_dim(const at::Tensor& input) override;

 private:
  ProcessGroup group_;
};
TORCH_MODULE(SyncBatchNorm);

/// A module whose batch norms are synchronised in forward. It stands in for a std::shared_ptr or
/// ModuleHolder of the module, in DistributedDataParallel too. See convert_sync_batchnorm.
template <class ModulePtr>
class SyncBatchNormed {
 public:
  SyncBatchNormed(ModulePtr module, ProcessGroup group)
      : module_(std::move(module)), group_(std::move(group)) {}

  template <class... Args>
  auto forward(Args&&... args) {
    std::optional<SyncBatchNormGuard> guard;
    if (module_->is_training()) guard.emplace(group_);
    return module_->forward(std::forward<Args>(args)...);
  }
  /// Of the module, for wrappers and loops that take this in its place.
  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }
  bool is_training() const { return module_->is_training(); }
  auto& operator*() { return *module_; }
  const auto& operator*() const { return *module_; }
  SyncBatchNormed* operator->() { return this; }
  const SyncBatchNormed* operator->() const { return this; }
  auto parameters() const { return module_->parameters(); }
  auto ptr() const { return detail::module_pointer(module_); }

 private:
  ModulePtr module_;
  ProcessGroup group_;
};

/// torch.nn.SyncBatchNorm.convert_sync_batchnorm: all batch norms of the module, in whatever
/// modules and functions, take the statistics of all ranks while forward runs in training mode.
/// Instance norms do not, as in Python.
///
///     DistributedDataParallel ddp(convert_sync_batchnorm(model, group), group);
///
/// A C++ module calls its own members, which cannot be replaced from outside. So the module is not
/// changed: at::batch_norm, which it calls, is replaced during forward. Tensors keep their names. A
/// batch norm that tracks no running statistics is synchronised by the root's training mode. Batch
/// norms refuse a rank's batch of one value per channel, where SyncBatchNorm itself takes it. Do
/// not call `module` itself in training; evaluate with either.
template <class ModulePtr>
SyncBatchNormed<ModulePtr> convert_sync_batchnorm(ModulePtr module, ProcessGroup group) {
  return SyncBatchNormed<ModulePtr>(std::move(module), std::move(group));
}

}  // namespace lockstep
