#include "lockstep/data/loader.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ParallelGuard.h>
#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/data/transform_runner.h"

namespace lockstep {
namespace {

/// The memory of one batch of full size.
struct Buffer {
  at::Tensor data;
  at::Tensor target;
};

bool held_by_pool_alone(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.storage().use_count() == 1;
}

/// Gives out buffers and takes back, without being told, those that nobody refers to any more.
/// Pinned ones are not kept: a copy to the device may still read a buffer that nobody refers to.
/// LibTorch's allocator knows of such copies and keeps the memory for the next batch itself.
class BufferPool {
 public:
  BufferPool(SampleSpec data, SampleSpec target, int64_t rows, int64_t capacity, bool pin)
      : data_(std::move(data)),
        target_(std::move(target)),
        rows_(rows),
        capacity_(capacity),
        pin_(pin) {}

  Buffer take() {
    if (pin_) return make();
    const std::lock_guard lock(mutex_);
    for (const Buffer& buffer : buffers_) {
      if (held_by_pool_alone(buffer.data) && held_by_pool_alone(buffer.target)) return buffer;
    }
    Buffer buffer = make();
    if (static_cast<int64_t>(buffers_.size()) < capacity_) buffers_.push_back(buffer);
    return buffer;
  }

 private:
  Buffer make() const { return {make(data_), make(target_)}; }
  at::Tensor make(const SampleSpec& spec) const {
    return at::empty(spec.batch_shape(rows_),
                     at::TensorOptions().dtype(spec.dtype).pinned_memory(pin_));
  }

  const SampleSpec data_;
  const SampleSpec target_;
  const int64_t rows_;
  const int64_t capacity_;
  const bool pin_;
  std::mutex mutex_;
  std::vector<Buffer> buffers_;
};

/// Threads that make batches [first, last) ahead of the thread that takes them, in order. At most
/// `window` batches are ready or in the making at a time. All signals are blocked in the threads,
/// so that they go to the program's own. LibTorch's operations run on the thread itself there. A
/// machine that cannot start a thread ends the program.
class Prefetcher {
 public:
  /// Makes batch number `batch`. Called from the thread `worker` in [0, workers).
  using Make = std::function<Batch(int worker, int64_t batch)>;

  Prefetcher(int workers, int64_t window, int64_t first, int64_t last, Make make)
      : make_(std::move(make)), last_(last), next_(first) {
    for (int64_t i = 0; i < window; ++i) order();
    for (int worker = 0; worker < workers; ++worker)
      threads_.emplace_back([this, worker] { work(worker); });
  }
  /// Lets each thread finish the batch that it is at, and joins.
  ~Prefetcher() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    ordered_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  /// The next batch. Waits until it is made. Throws what making it threw. Not to be called after
  /// the last one or after it threw.
  Batch take() {
    std::future<Batch> next = std::move(made_.front());
    made_.pop_front();
    next.wait();
    order();
    return next.get();  // Or throws what making it threw. The one after it can be taken then.
  }

 private:
  using Order = std::packaged_task<Batch(int worker)>;

  void order() {
    if (next_ == last_) return;
    Order order([this, batch = next_++](int worker) { return make_(worker, batch); });
    made_.push_back(order.get_future());
    {
      const std::lock_guard lock(mutex_);
      orders_.push_back(std::move(order));
    }
    ordered_.notify_one();
  }

  void work(int worker) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
    // No team of threads for each worker's tensor operations.
    const c10::ParallelGuard one_thread(true);
    while (true) {
      std::unique_lock lock(mutex_);
      ordered_.wait(lock, [&] { return stopping_ || !orders_.empty(); });
      if (stopping_) return;
      Order order = std::move(orders_.front());
      orders_.pop_front();
      lock.unlock();
      order(worker);
    }
  }

  const Make make_;
  const int64_t last_;
  int64_t next_;                         ///< To be ordered.
  std::deque<std::future<Batch>> made_;  ///< Of what was ordered and not taken.
  std::mutex mutex_;                     ///< Guards the rest but the threads.
  std::condition_variable ordered_;
  std::deque<Order> orders_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

/// What one thread needs to make batches.
struct Worker {
  std::unique_ptr<SampleSource> source;
  TransformRunner runner;
  Buffer raw;  ///< Samples as they were read, of a source that is not in memory.
  std::vector<int64_t> rows;
};

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
  Impl(std::unique_ptr<SampleSource> source, DistributedSampler sampler, Compose transforms,
       LoaderOptions options)
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
    pool_.emplace(data_spec_, target_spec_, std::min(options_.batch_size, samples_),
                  window() + kHeldByTheUser, options_.pin_memory);
  }

  void start(int64_t epoch, int64_t first_batch) {
    if (first_batch < 0 || first_batch > batches_)
      throw UsageError("cannot start epoch " + std::to_string(epoch) + " at batch " +
                       std::to_string(first_batch) + ": it has " + std::to_string(batches_) +
                       " batches");
    prefetcher_.reset();
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
    prefetcher_.reset();
    running_ = false;
    SamplerOptions options = sampler_.options();
    options.skip = samples;
    sampler_ = DistributedSampler(options);
    indices_.clear();
    count_batches();
  }

  bool next(Batch& batch) {
    batch = Batch{};  // gives its buffer back
    if (!running_) return false;
    if (next_batch_ == batches_) {
      prefetcher_.reset();
      running_ = false;
      return false;
    }
    batch = options_.num_workers > 0 ? take() : make(worker(0), next_batch_);
    ++next_batch_;
    return true;
  }

  SamplerState state() const {
    return {epoch_, std::min(next_batch_ * options_.batch_size, samples_)};
  }

 private:
  friend class DataLoader;

  /// The batch in the user's hands, and the one that a loop still holds while it asks for the next.
  static constexpr int64_t kHeldByTheUser = 2;

  int64_t window() const {
    return std::min<int64_t>(batches_, int64_t{options_.num_workers} * options_.prefetch);
  }

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

  Worker& worker(int index) {
    while (static_cast<int>(workers_.size()) <= index)
      workers_.push_back(
          {source_->clone(), TransformRunner(transforms_, source_->data_spec()), {}, {}});
    return workers_[index];
  }

  void start_workers() {
    const int64_t left = batches_ - next_batch_;
    if (options_.num_workers == 0 || left == 0) return;
    const int threads = static_cast<int>(std::min<int64_t>(options_.num_workers, left));
    worker(threads - 1);
    prefetcher_.emplace(threads, window(), next_batch_, batches_,
                        [this](int thread, int64_t b) { return make(workers_[thread], b); });
  }

  /// After an error the threads are stopped; the next call starts them again at the same batch.
  Batch take() {
    if (!prefetcher_) start_workers();
    try {
      return prefetcher_->take();
    } catch (...) {
      prefetcher_.reset();
      throw;
    }
  }

  Batch make(Worker& worker, int64_t number) {
    // A buffer made under somebody's InferenceMode could never be used for training later.
    const c10::InferenceMode normal_tensors(false);
    const int64_t begin = number * options_.batch_size;
    const int64_t count = std::min(options_.batch_size, samples_ - begin);
    const std::span<const int64_t> indices(indices_.data() + begin, static_cast<size_t>(count));
    const Buffer buffer = pool_->take();
    Batch batch;
    batch.data = buffer.data.narrow(0, 0, count);
    batch.target = buffer.target.narrow(0, 0, count);
    batch.index = number;
    const int64_t first_padding = sampler_.samples_per_rank() - sampler_.padding();
    batch.padding = std::clamp<int64_t>(begin + count - first_padding, 0, count);
    fill(worker, batch, indices);
    return batch;
  }

  void fill(Worker& worker, const Batch& batch, std::span<const int64_t> indices) {
    if (const at::Tensor* rows = worker.source->rows()) {
      worker.source->read(indices, at::Tensor(), batch.target);
      worker.runner.run(RowView(*rows, indices), batch.data, options_.seed, epoch_, indices);
      return;
    }
    const auto count = static_cast<int64_t>(indices.size());
    if (!worker.raw.data.defined()) {
      const SampleSpec spec = worker.source->data_spec();
      const int64_t rows = std::min(options_.batch_size, samples_);
      worker.raw.data = at::empty(spec.batch_shape(rows), spec.dtype);
      worker.rows.resize(rows);
      std::iota(worker.rows.begin(), worker.rows.end(), 0);
    }
    worker.source->read(indices, worker.raw.data.narrow(0, 0, count), batch.target);
    const std::span<const int64_t> all(worker.rows.data(), indices.size());
    worker.runner.run(RowView(worker.raw.data, all), batch.data, options_.seed, epoch_, indices);
  }

  std::unique_ptr<SampleSource> source_;
  DistributedSampler sampler_;
  Compose transforms_;
  LoaderOptions options_;
  SampleSpec data_spec_;
  SampleSpec target_spec_;
  int64_t batches_ = 0;
  int64_t samples_ = 0;
  std::optional<BufferPool> pool_;
  std::vector<Worker> workers_;

  int64_t epoch_ = 0;
  int64_t next_batch_ = 0;
  bool running_ = false;
  std::vector<int64_t> indices_;          ///< Of epoch_.
  std::optional<Prefetcher> prefetcher_;  ///< Last: its threads use all of the above.
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
