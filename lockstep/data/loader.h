#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>

#include "lockstep/data/dataset.h"
#include "lockstep/data/sample_source.h"
#include "lockstep/data/sampler.h"
#include "lockstep/data/transforms.h"

namespace lockstep {

struct LoaderOptions {
  int64_t batch_size = 32;  ///< Samples of this process in a batch; at least 1.
  /// Leaves out an epoch's last batch when it is not full. False as in Python.
  bool drop_last = false;
  /// Threads that prepare batches. 0: `next` does it itself, which is best for data in memory: a
  /// batch of MNIST costs less than handing it over.
  int num_workers = 0;
  int prefetch = 2;  ///< Batches prepared ahead for each worker. 2 as in Python; at least 1.
  /// Batches in page-locked memory, for copies to a CUDA device that overlap with work. Throws
  /// UsageError where there is no CUDA device.
  bool pin_memory = false;
  /// Of random transforms. The same on all ranks. The order of samples has the sampler's own seed.
  uint64_t seed = 0;
};

/// One batch. Its tensors stay as they are for as long as someone holds them or a view of them. The
/// loader writes into a buffer again only when nobody holds it. A loop that holds one batch at a
/// time, as training does, lets it reuse a few buffers for the whole run.
struct Batch {
  at::Tensor data;      ///< [B, ...] on the CPU, of the transforms' output dtype.
  at::Tensor target;    ///< [B] int64 or [B, K] float32, as the data set has them.
  int64_t index = 0;    ///< Which batch of the epoch, from 0; goes on counting after a resumption.
  int64_t padding = 0;  ///< How many of the last rows are the sampler's padding: see there.

  int64_t size() const { return target.size(0); }
};

/// Gives an epoch's batches in the sampler's order. The same options, seeds and epoch give the same
/// bits. The number of workers and a resumption in the middle of the epoch change nothing.
///
///   DataLoader loader(splits.train, DistributedSampler({...}), {normalize(), flatten()}, {...});
///   for (int64_t epoch = 0; epoch < epochs; ++epoch)
///     for (const Batch& batch : loader.epoch(epoch)) ...
///
/// One thread uses a loader at a time. What a worker throws, the `next` of its batch throws. The
/// destructor and a new epoch stop and join the workers at any moment.
class DataLoader {
 public:
  /// Throws UsageError when the sampler is for another size of data set, an option is out of range,
  /// or the transforms do not fit. Also when there is no batch at all: with drop_last and a batch
  /// larger than this rank's data, say. Without drop_last that is one short batch.
  DataLoader(TensorDataset dataset, DistributedSampler sampler, Compose transforms = {},
             LoaderOptions options = {});
  DataLoader(std::unique_ptr<SampleSource> source, DistributedSampler sampler,
             Compose transforms = {}, LoaderOptions options = {});
  ~DataLoader();
  DataLoader(DataLoader&&) noexcept;
  DataLoader& operator=(DataLoader&&) noexcept;

  class Epoch;
  /// Starts an epoch at a batch in [0, batches_per_epoch()] and ends the one in progress. The
  /// result is for a range-for. With `next` it is not needed.
  Epoch epoch(int64_t epoch, int64_t first_batch = 0);
  /// Starts where a loader with the same options stood when it gave this state. Throws UsageError
  /// when the position is on no boundary of its batches.
  Epoch resume(const SamplerState& state);
  /// The next batch. False, with an empty batch, at the epoch's end or before the first epoch.
  bool next(Batch& batch);

  /// After the last batch that `next` gave. Prefetched ones do not count.
  SamplerState state() const;
  int64_t batches_per_epoch() const;
  /// Samples of this rank in an epoch: the sampler's, less those that drop_last leaves out.
  int64_t samples_per_epoch() const;
  /// Shape and dtype of one row of Batch::data.
  const SampleSpec& data_spec() const;
  const SampleSpec& target_spec() const;
  const DistributedSampler& sampler() const;
  const LoaderOptions& options() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// The batches that are left of an epoch, to be walked through once. Refers to its loader.
class DataLoader::Epoch {
 public:
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using pointer = Batch*;
    using reference = Batch&;

    Batch& operator*() const { return *batch_; }
    Batch* operator->() const { return batch_; }
    Iterator& operator++() {
      if (!loader_->next(*batch_)) loader_ = nullptr;
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return loader_ == nullptr; }

   private:
    friend class Epoch;
    Iterator(DataLoader* loader, Batch* batch) : loader_(loader), batch_(batch) { ++*this; }
    DataLoader* loader_;
    Batch* batch_;
  };

  Iterator begin() { return Iterator(loader_, &batch_); }
  std::default_sentinel_t end() const { return {}; }

 private:
  friend class DataLoader;
  explicit Epoch(DataLoader* loader) : loader_(loader) {}
  DataLoader* loader_;
  Batch batch_;
};

}  // namespace lockstep
