#include "lockstep/data/loader.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/thread_pool.h>
#include <c10/util/ParallelGuard.h>
#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <deque>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

/// They go to the program's own threads.
void block_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
}

void check(const LoaderOptions& options) {
  const auto at_least = [](const char* name, int64_t value, int64_t minimum) {
    if (value < minimum)
      throw UsageError(std::string("the loader's ") + name + " is " + std::to_string(value) +
                       ", expected at least " + std::to_string(minimum));
  };
  at_least("batch_size", options.batch_size, 1);
  at_least("num_workers", options.num_workers, 0);
  at_least("prefetch", options.prefetch, 1);
  if (options.pin_memory && !at::hasCUDA())
    throw UsageError("the loader's pin_memory needs a CUDA device, and there is none",
                     "leave pin_memory out to train on the CPU");
}

}  // namespace

class DataLoader::Impl {
 public:
  Impl(std::unique_ptr<SampleSource> source, const DistributedSampler& sampler, Compose transforms,
       const LoaderOptions& options)
      : source_(std::move(source)),
        sampler_(sampler),
        transforms_(std::move(transforms)),
        options_(options) {
    check(options_);
    if (source_->size() != sampler_.options().dataset_size)
      throw UsageError("data set '" + source_->name() + "' has " + std::to_string(source_->size()) +
                       " samples, but the sampler is for " +
                       std::to_string(sampler_.options().dataset_size));
    count_batches();
    data_spec_ = transforms_.output(source_->data_spec());
    target_spec_ = source_->target_spec();
  }

  void start(int64_t epoch, int64_t first_batch) {
    if (first_batch < 0 || first_batch > batches_)
      throw UsageError("cannot start epoch " + std::to_string(epoch) + " at batch " +
                       std::to_string(first_batch) + ": it has " + std::to_string(batches_) +
                       " batches");
    stop_workers();
    if (indices_.empty() || epoch_ != epoch) indices_ = sampler_.indices(epoch);
    epoch_ = epoch;
    next_batch_ = first_batch;
    running_ = true;
    start_workers();
  }

  void resume(const SamplerState& state) {
    const int64_t position = state.position;
    const bool at_end = position == samples_;
    if (position < 0 || position > samples_ || (!at_end && position % options_.batch_size != 0))
      throw UsageError("cannot resume epoch " + std::to_string(state.epoch) + " after " +
                           std::to_string(position) + " of this rank's " +
                           std::to_string(samples_) + " samples in batches of " +
                           std::to_string(options_.batch_size),
                       "resume with the batch size, the data and the number of ranks that the "
                       "interrupted run had, or start at an epoch's beginning");
    start(state.epoch, at_end ? batches_ : position / options_.batch_size);
  }

  void skip(int64_t samples) {
    stop_workers();
    running_ = false;
    SamplerOptions options = sampler_.options();
    options.skip = samples;
    sampler_ = DistributedSampler(options);
    indices_.clear();
    count_batches();
  }

  bool next(Batch& batch) {
    batch = Batch{};  // gives its memory back
    if (!running_) return false;
    if (next_batch_ == batches_) {
      stop_workers();
      running_ = false;
      return false;
    }
    batch = options_.num_workers > 0 ? take() : make(*source_, next_batch_);
    ++next_batch_;
    return true;
  }

  SamplerState state() const {
    return {epoch_, std::min(next_batch_ * options_.batch_size, samples_)};
  }

 private:
  friend class DataLoader;

  void count_batches() {
    const int64_t all = sampler_.samples_per_rank();
    const int64_t size = options_.batch_size;
    batches_ = options_.drop_last ? all / size : all / size + (all % size != 0);
    samples_ = std::min(all, batches_ * size);
    if (batches_ > 0 || sampler_.options().skip > 0) return;
    throw UsageError(
        "a batch of " + std::to_string(size) + " is larger than the data: rank " +
            std::to_string(sampler_.options().rank) + " has " + std::to_string(all) + " of the " +
            std::to_string(source_->size()) + " samples of '" + source_->name() +
            "', and drop_last leaves no batch",
        all > 0 ? "set the batch size to at most " + std::to_string(all) + ", or drop_last to false"
                : "use fewer ranks, or a sampler without drop_last");
  }

  /// A machine that cannot start a thread ends the program.
  void start_workers() {
    const int64_t left = batches_ - next_batch_;
    if (options_.num_workers == 0 || left == 0) return;
    const int threads = static_cast<int>(std::min<int64_t>(options_.num_workers, left));
    while (static_cast<int>(clones_.size()) < threads) clones_.push_back(source_->clone());
    ordered_ = next_batch_;
    workers_.emplace(threads, /*numa_node_id=*/-1, &block_signals);
    for (int64_t i = 0; i < int64_t{options_.num_workers} * options_.prefetch; ++i) order();
  }
  /// Lets each thread finish the batch that it is at.
  void stop_workers() {
    workers_.reset();
    made_.clear();
  }

  void order() {
    if (ordered_ == batches_) return;
    const auto order = std::make_shared<std::packaged_task<Batch(size_t)>>(
        [this, number = ordered_++](size_t worker) {
          const c10::ParallelGuard one_thread(true);  // LibTorch's operations start no threads.
          return make(*clones_[worker], number);
        });
    made_.push_back(order->get_future());
    workers_->runTaskWithID([order](size_t worker) { (*order)(worker); });
  }

  /// After an error the threads are stopped; the next call starts them again at the same batch.
  Batch take() {
    if (!workers_) start_workers();
    std::future<Batch> next = std::move(made_.front());
    made_.pop_front();
    next.wait();
    try {
      order();
      return next.get();
    } catch (...) {
      stop_workers();
      throw;
    }
  }

  Batch make(SampleSource& source, int64_t number) {
    // A batch made under somebody's InferenceMode could never be used for training later.
    const c10::InferenceMode normal_tensors(false);
    const at::NoGradGuard no_grad;
    const int64_t begin = number * options_.batch_size;
    const int64_t count = std::min(options_.batch_size, samples_ - begin);
    const std::span<const int64_t> indices(indices_.data() + begin, static_cast<size_t>(count));
    Batch batch;
    const at::Tensor samples = source.data_spec().empty_batch(count);
    batch.target = target_spec_.empty_batch(count, options_.pin_memory);
    source.read(indices, samples, batch.target);
    batch.data = transforms_(samples, options_.seed, epoch_, indices);
    if (const auto spec = SampleSpec::of_rows(batch.data); spec != data_spec_)
      throw UsageError("the transforms made samples of " + spec.describe() + " and of " +
                       data_spec_.describe() + "; expected the same for all batches");
    if (options_.pin_memory) batch.data = batch.data.pin_memory();
    batch.index = number;
    const int64_t first_padding = sampler_.samples_per_rank() - sampler_.padding();
    batch.padding = std::clamp<int64_t>(begin + count - first_padding, 0, count);
    return batch;
  }

  std::unique_ptr<SampleSource> source_;
  DistributedSampler sampler_;
  Compose transforms_;
  LoaderOptions options_;
  SampleSpec data_spec_;
  SampleSpec target_spec_;
  int64_t batches_ = 0;
  int64_t samples_ = 0;
  std::vector<std::unique_ptr<SampleSource>> clones_;  ///< One a thread.

  int64_t epoch_ = 0;
  int64_t next_batch_ = 0;
  bool running_ = false;
  std::vector<int64_t> indices_;            ///< Of epoch_.
  int64_t ordered_ = 0;                     ///< Batches up to this one are ordered of the workers.
  std::deque<std::future<Batch>> made_;     ///< Of what was ordered and not taken.
  std::optional<c10::ThreadPool> workers_;  ///< Last: they use all of the above.
};

DataLoader::DataLoader(TensorDataset dataset, DistributedSampler sampler, Compose transforms,
                       LoaderOptions options)
    : DataLoader(tensor_source(std::move(dataset)), sampler, std::move(transforms), options) {}

DataLoader::DataLoader(std::unique_ptr<SampleSource> source, DistributedSampler sampler,
                       Compose transforms, LoaderOptions options)
    : impl_(std::make_unique<Impl>(std::move(source), sampler, std::move(transforms), options)) {}

DataLoader::~DataLoader() = default;
DataLoader::DataLoader(DataLoader&&) noexcept = default;
DataLoader& DataLoader::operator=(DataLoader&&) noexcept = default;

DataLoader::Epoch DataLoader::epoch(int64_t epoch, int64_t first_batch) {
  impl_->start(epoch, first_batch);
  return Epoch(this);
}

DataLoader::Epoch DataLoader::resume(const SamplerState& state) {
  impl_->resume(state);
  return Epoch(this);
}

void DataLoader::skip(int64_t samples) {
  impl_->skip(samples);
}
bool DataLoader::next(Batch& batch) {
  return impl_->next(batch);
}
SamplerState DataLoader::state() const {
  return impl_->state();
}
int64_t DataLoader::batches_per_epoch() const {
  return impl_->batches_;
}
int64_t DataLoader::samples_per_epoch() const {
  return impl_->samples_;
}
const SampleSpec& DataLoader::data_spec() const {
  return impl_->data_spec_;
}
const SampleSpec& DataLoader::target_spec() const {
  return impl_->target_spec_;
}
const DistributedSampler& DataLoader::sampler() const {
  return impl_->sampler_;
}
const LoaderOptions& DataLoader::options() const {
  return impl_->options_;
}

}  // namespace lockstep
