#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <vector>

#include "lockstep/data/loader.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/strategy.h"
#include "lockstep/train/callback.h"

namespace lockstep {

/// What a Trainer must know of a batch type. Specialise it for your own type, or override
/// TrainingModule's batch_size and prepare_batch. By default a batch has `size()` samples if it has
/// that function, else one, and it is not moved to the device.
template <class B>
struct BatchTraits {
  static int64_t size(const B& batch) {
    if constexpr (requires {
                    { batch.size() } -> std::convertible_to<int64_t>;
                  }) {
      return static_cast<int64_t>(batch.size());
    } else {
      return 1;
    }
  }
  static B to(const B& batch, c10::Device) { return batch; }
};

/// The first dimension of a tensor is the batch dimension.
template <>
struct BatchTraits<at::Tensor> {
  static int64_t size(const at::Tensor& batch) { return batch.dim() > 0 ? batch.size(0) : 1; }
  static at::Tensor to(const at::Tensor& batch, c10::Device device) {
    return device.is_cpu() ? batch : batch.to(device, /*non_blocking=*/true);
  }
  static void cast(at::Tensor& batch, at::ScalarType dtype) {
    if (batch.is_floating_point()) batch = batch.to(dtype);
  }
};

/// The loader's own.
template <>
struct BatchTraits<Batch> {
  static int64_t size(const Batch& batch) { return batch.size(); }
  static Batch to(const Batch& batch, c10::Device device) {
    Batch moved = batch;
    moved.data = BatchTraits<at::Tensor>::to(batch.data, device);
    moved.target = BatchTraits<at::Tensor>::to(batch.target, device);
    return moved;
  }
  /// Targets keep their dtype: the loss is computed in float32.
  static void cast(Batch& batch, at::ScalarType dtype) {
    BatchTraits<at::Tensor>::cast(batch.data, dtype);
  }
};

/// The first member says how many samples there are.
template <class A, class B>
struct BatchTraits<std::pair<A, B>> {
  static int64_t size(const std::pair<A, B>& batch) { return BatchTraits<A>::size(batch.first); }
  static std::pair<A, B> to(const std::pair<A, B>& batch, c10::Device device) {
    return {BatchTraits<A>::to(batch.first, device), BatchTraits<B>::to(batch.second, device)};
  }
  static void cast(std::pair<A, B>& batch, at::ScalarType dtype) requires requires {
    BatchTraits<A>::cast(batch.first, dtype);
  }
  {
    BatchTraits<A>::cast(batch.first, dtype);
    if constexpr (requires { BatchTraits<B>::cast(batch.second, dtype); }) {
      BatchTraits<B>::cast(batch.second, dtype);
    }
  }
};
template <class First, class... Rest>
struct BatchTraits<std::tuple<First, Rest...>> {
  using Tuple = std::tuple<First, Rest...>;
  static int64_t size(const Tuple& batch) { return BatchTraits<First>::size(std::get<0>(batch)); }
  static Tuple to(const Tuple& batch, c10::Device device) {
    return std::apply(
        [&](const First& first, const Rest&... rest) {
          return Tuple(BatchTraits<First>::to(first, device),
                       BatchTraits<Rest>::to(rest, device)...);
        },
        batch);
  }
};
template <>
struct BatchTraits<std::vector<at::Tensor>> {
  static int64_t size(const std::vector<at::Tensor>& batch) {
    return batch.empty() ? 0 : BatchTraits<at::Tensor>::size(batch.front());
  }
  static std::vector<at::Tensor> to(const std::vector<at::Tensor>& batch, c10::Device device) {
    std::vector<at::Tensor> moved;
    for (const at::Tensor& tensor : batch) {
      moved.push_back(BatchTraits<at::Tensor>::to(tensor, device));
    }
    return moved;
  }
  static void cast(std::vector<at::Tensor>& batch, at::ScalarType dtype) {
    for (at::Tensor& tensor : batch) BatchTraits<at::Tensor>::cast(tensor, dtype);
  }
};

namespace detail {

/// A type-erased batch, passed from a loader to the module that takes batches of its type. It
/// refers to the batch, which must outlive it.
class AnyBatch {
 public:
  template <class B>
  explicit AnyBatch(const B& batch) : batch_(&batch), type_(&typeid(B)) {}
  /// Throws std::bad_cast where it is a batch of another type.
  template <class B>
  const B& as() const {
    if (*type_ != typeid(B)) throw std::bad_cast();
    return *static_cast<const B*>(batch_);
  }

 private:
  const void* batch_;
  const std::type_info* type_;
};

}  // namespace detail

class SupervisedModule;
namespace detail {
struct TrainingContext;
}

/// One optimizer of a module, and the parameters that it updates.
struct OptimizerConfig {
  /// See optimizer_factory. Called once, with the parameters of `module` or a strategy's shards of
  /// them.
  OptimizerFactory make;
  /// `total_steps` of 0 stands for all steps of the run.
  ScheduleOptions schedule = {};
  /// Your own schedule instead of `schedule`: the learning rate of update `step` (from 0).
  std::function<double(int64_t step, double base_lr)> lr_at = {};
  /// Whose parameters they are. Null: the whole TrainingModule. The modules of two optimizers must
  /// share no parameter.
  std::shared_ptr<torch::nn::Module> module = {};
  /// The name for `update` and in checkpoints. Required if there are several optimizers.
  std::string name = {};
};

/// make_optimizer with these options, of whatever parameters a strategy gives it.
OptimizerFactory optimizer_factory(std::string name, OptimizerOptions options = {});

/// What a Trainer trains, whatever the type of its batches: see TrainingModule.
class TrainingModuleBase : public torch::nn::Module {
 public:
  TrainingModuleBase();
  explicit TrainingModuleBase(std::string name);

  /// Called once by `Trainer::fit`, when the parameters are on its device.
  virtual std::vector<OptimizerConfig> configure_optimizers() = 0;
  /// False: `training_step` calls `update` itself. Must be false where there are several
  /// optimizers.
  virtual bool automatic_optimization() const { return true; }

  /// Called on every rank.
  virtual void on_train_epoch_start(int64_t epoch) {}
  virtual void on_train_epoch_end(int64_t epoch) {}
  /// With the metrics of all ranks.
  virtual void on_validation_epoch_end(const Metrics& metrics) {}

  /// For strategies that split a module into parts. Null: it cannot be split.
  virtual SupervisedModule* as_supervised() { return nullptr; }

  /// What a Trainer calls: the functions of TrainingModule, on batches of its type.
  virtual at::Tensor run_training_step(detail::AnyBatch batch, int64_t batch_index) = 0;
  virtual void run_validation_step(detail::AnyBatch batch, int64_t batch_index) = 0;
  virtual int64_t samples_of(detail::AnyBatch batch) const = 0;

 protected:
  /// Logs a metric: the mean over `count` samples of this rank. The values of all ranks under one
  /// name are summed in double and divided by the sum of their counts. So each sample counts once,
  /// even if ranks have different numbers of them. In training the values go to the next log and to
  /// the epoch's metrics, in validation to the epoch's. "loss" and "accuracy" are those of Metrics,
  /// other names are in Metrics::values. The loss that `training_step` returns is logged as "loss",
  /// unless the step logged one itself.
  void log(const std::string& name, double mean, int64_t count = 1);
  void log(const std::string& name, const at::Tensor& mean, int64_t count = 1);
  /// The same for a sum over `count` samples. Counts are exact: 61 correct of 64.
  void log_sum(const std::string& name, double sum, int64_t count);

  /// Only without automatic optimization, in `training_step`: runs `loss` and backward with this
  /// optimizer's parameters alone (the others' get no gradient), clips, steps, and drops the
  /// gradients. Gives the loss. Every rank makes the same updates. `name` may be empty where there
  /// is one optimizer.
  double update(const std::string& name, const std::function<at::Tensor()>& loss);
  /// The same without the step: the gradients add up to those of the next `update`.
  double accumulate(const std::string& name, const std::function<at::Tensor()>& loss);

  /// Where the Trainer works. Throws UsageError outside of its calls.
  c10::Device device() const;
  /// Steps done in the whole run, and the epoch, from 0.
  int64_t global_step() const;
  int64_t current_epoch() const;

 private:
  friend struct detail::TrainingContext;
  friend class SupervisedModule;
  detail::TrainingContext& context(const char* caller) const;
  double run_update(const std::string& name, const std::function<at::Tensor()>& loss,
                    bool last_of_step);
  detail::TrainingContext* context_ = nullptr;  ///< The Trainer's, during its calls.
};

/// The counterpart of Lightning's LightningModule: the parameters, the loss of a batch, and the
/// optimizers. The Trainer does everything else (ranks, devices, precision, clipping, checkpoints).
///
///     struct Classifier : lockstep::TrainingModule<lockstep::Batch> {
///       torch::nn::Linear layer = register_module("layer", torch::nn::Linear(784, 10));
///       at::Tensor training_step(const lockstep::Batch& batch, int64_t) override {
///         return cross_entropy(layer->forward(batch.data), batch.target);
///       }
///       std::vector<lockstep::OptimizerConfig> configure_optimizers() override {
///         return {{.make = lockstep::optimizer_factory("adam", {.lr = 1e-3})}};
///       }
///     };
///
/// `B` is any type of a batch that the loader gives. Calls come from the thread that runs the
/// Trainer, one at a time.
template <class B>
class TrainingModule : public TrainingModuleBase {
 public:
  using TrainingModuleBase::TrainingModuleBase;
  using BatchType = B;

  /// Returns the loss of a batch on the Trainer's device: a scalar tensor, from which backward
  /// starts. Without automatic optimization what it returns is not used.
  virtual at::Tensor training_step(const B& batch, int64_t batch_index) = 0;
  /// Logs metrics of a held-out batch, in evaluation mode and without gradients. It is called the
  /// same number of times on all ranks. The padding of a Batch is removed before.
  virtual void validation_step(const B& batch, int64_t batch_index) {}

  /// Samples of a batch, by which its loss counts. See BatchTraits.
  virtual int64_t batch_size(const B& batch) const { return BatchTraits<B>::size(batch); }
  /// Lightning's transfer_batch_to_device and on_after_batch_transfer.
  virtual B prepare_batch(const B& batch, c10::Device device) const {
    return BatchTraits<B>::to(batch, device);
  }

  at::Tensor run_training_step(detail::AnyBatch batch, int64_t batch_index) final {
    return training_step(batch.as<B>(), batch_index);
  }
  void run_validation_step(detail::AnyBatch batch, int64_t batch_index) final {
    validation_step(batch.as<B>(), batch_index);
  }
  int64_t samples_of(detail::AnyBatch batch) const final { return batch_size(batch.as<B>()); }
};

/// A module of one input and one output, which every strategy can train. Strategies that run a
/// model in parts need `layers`.
class SupervisedModule : public TrainingModule<Batch> {
 public:
  using TrainingModule<Batch>::TrainingModule;

  virtual at::Tensor forward(const at::Tensor& input) = 0;
  /// The mean over the samples.
  virtual at::Tensor loss(const at::Tensor& output, const at::Tensor& target) = 0;
  /// Logs metrics of a batch, or of a part of one.
  virtual void measure(const at::Tensor& output, const at::Tensor& target, double loss) {}
  /// Logs metrics of a held-out batch. By default: the loss, and what `measure` logs.
  virtual void validate(const at::Tensor& output, const at::Tensor& target);
  /// The module as a chain of layers, whose forwards one after the other give `forward`. Empty: it
  /// is not a chain.
  virtual std::vector<Layer> layers() { return {}; }
  /// `forward` of a copy of the optimizer's module: see StrategySetup::forward. Empty: copies
  /// cannot be run.
  virtual std::function<at::Tensor(torch::nn::Module& copy, const at::Tensor& input)>
  forward_of_copies() {
    return {};
  }

  at::Tensor training_step(const Batch& batch, int64_t batch_index) override;
  void validation_step(const Batch& batch, int64_t batch_index) override;
  SupervisedModule* as_supervised() override { return this; }
  /// Converts a 16-bit output to float32 for `loss`, `measure` and `validate`.
  static at::Tensor in_float32(const at::Tensor& output);
  /// The loss of an output, after its metrics are noted.
  at::Tensor measured_loss(const at::Tensor& output, const at::Tensor& target);
};

}  // namespace lockstep
