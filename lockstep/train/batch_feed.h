#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "lockstep/train/training_module.h"

namespace lockstep {

/// A loader of batches of type `B`, as a Trainer reads it. DataLoader is one. Every rank's gives
/// equally many batches: those of its share of the data. The same epoch and first batch give the
/// same batches, if a resumed run is to go on to the same bits.
template <class L, class B>
concept BatchLoader = requires(L loader, const L& constant, B batch, int64_t number) {
  /// Starts an epoch (from 0) at one of its batches.
  loader.epoch(number, number);
  /// The next batch; false at the epoch's end.
  { loader.next(batch) } -> std::convertible_to<bool>;
  { constant.batches_per_epoch() } -> std::convertible_to<int64_t>;
};

namespace detail {

/// A loader and the steps of a module on its batches, without their types.
class BatchFeed {
 public:
  virtual ~BatchFeed() = default;
  virtual int64_t batches_per_epoch() const = 0;
  virtual void start(int64_t epoch, int64_t first_batch) = 0;
  /// Takes the next batch and prepares it for `module` on `device`.
  virtual bool next(const TrainingModuleBase& module, c10::Device device) = 0;
  /// The same, less the sampler's padding. `has_samples` tells where nothing was left: then the
  /// batch is whole, so that all ranks make the same calls, but does not count.
  virtual bool next_without_padding(const TrainingModuleBase& module, c10::Device device) = 0;
  /// A batch for trying things out: zeros, or the first batch where the loader knows no shapes.
  virtual void take_example(const TrainingModuleBase& module, c10::Device device) = 0;

  /// The input of a batch of zeros, of as many samples as the loader's batches have. For modules
  /// and loaders of Batch that know shapes; undefined for others.
  virtual at::Tensor example_input(const TrainingModuleBase& module, c10::Device device) const = 0;

  /// Floating-point tensors of the batches that the loader gives become of this dtype.
  void cast_to(at::ScalarType dtype) { dtype_ = dtype; }
  bool has_samples() const { return has_samples_; }
  virtual int64_t batch_size(const TrainingModuleBase& module) const = 0;
  virtual at::Tensor training_step(TrainingModuleBase& module, int64_t index) = 0;
  virtual void validation_step(TrainingModuleBase& module, int64_t index) = 0;
  /// The batch, of a SupervisedModule only.
  virtual const Batch* batch() const = 0;
  /// How the data is shared; null where the loader does not say.
  virtual const SamplerOptions* sampler() const = 0;

 protected:
  bool has_samples_ = true;
  std::optional<at::ScalarType> dtype_;
};

/// Zeros of so many samples.
Batch example_batch(const DataLoader& loader, int64_t samples = 2);
/// Gives whether any row is left; where none is, the batch stays as it is.
bool drop_padding(Batch& batch);

template <class B, class L>
class FeedOf : public BatchFeed {
 public:
  explicit FeedOf(L loader) : loader_(std::move(loader)) {}

  int64_t batches_per_epoch() const override {
    return static_cast<int64_t>(std::as_const(loader_).batches_per_epoch());
  }
  void start(int64_t epoch, int64_t first_batch) override { loader_.epoch(epoch, first_batch); }

  bool next(const TrainingModuleBase& module, c10::Device device) override {
    batch_ = B{};  // lets the loader use its buffers again
    if (!loader_.next(loaded_)) return false;
    prepare(loaded_, module, device);
    return true;
  }

  bool next_without_padding(const TrainingModuleBase& module, c10::Device device) override {
    batch_ = B{};
    if (!loader_.next(loaded_)) return false;
    if constexpr (std::same_as<B, Batch>) has_samples_ = drop_padding(loaded_);
    prepare(loaded_, module, device);
    return true;
  }

  void take_example(const TrainingModuleBase& module, c10::Device device) override {
    if constexpr (std::same_as<L, DataLoader> && std::same_as<B, Batch>) {
      prepare(example_batch(loader_), module, device);
    } else {
      start(0, 0);
      next(module, device);
    }
  }

  at::Tensor example_input(const TrainingModuleBase& module, c10::Device device) const override {
    if constexpr (std::same_as<L, DataLoader> && std::same_as<B, Batch>) {
      const Batch zeros = example_batch(loader_, loader_.options().batch_size);
      return of(module).prepare_batch(zeros, device).data;
    }
    return {};
  }

  int64_t batch_size(const TrainingModuleBase& module) const override {
    return of(module).batch_size(batch_);
  }
  at::Tensor training_step(TrainingModuleBase& module, int64_t index) override {
    return static_cast<TrainingModule<B>&>(module).training_step(batch_, index);
  }
  void validation_step(TrainingModuleBase& module, int64_t index) override {
    static_cast<TrainingModule<B>&>(module).validation_step(batch_, index);
  }
  const Batch* batch() const override {
    if constexpr (std::same_as<B, Batch>) return &batch_;
    return nullptr;
  }
  const SamplerOptions* sampler() const override {
    if constexpr (std::same_as<L, DataLoader>) return &loader_.sampler().options();
    return nullptr;
  }

 private:
  void prepare(const B& loaded, const TrainingModuleBase& module, c10::Device device) {
    batch_ = of(module).prepare_batch(loaded, device);
    if constexpr (requires { BatchTraits<B>::cast(batch_, at::kFloat); }) {
      if (dtype_) BatchTraits<B>::cast(batch_, *dtype_);
    }
  }
  static const TrainingModule<B>& of(const TrainingModuleBase& module) {
    return static_cast<const TrainingModule<B>&>(module);
  }

  L loader_;
  B loaded_{};
  B batch_{};
};

}  // namespace detail
}  // namespace lockstep
