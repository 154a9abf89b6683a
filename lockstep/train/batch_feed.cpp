#include "lockstep/train/batch_feed.h"

#include <ATen/ops/zeros.h>

#include "lockstep/base/error.h"

namespace lockstep::detail {

Batch example_batch(const DataLoader& loader, int64_t samples) {
  const auto zeros = [samples](const SampleSpec& spec) {
    return at::zeros(spec.batch_shape(samples), at::device(c10::kCPU).dtype(spec.dtype));
  };
  Batch batch;
  batch.data = zeros(loader.data_spec());
  batch.target = zeros(loader.target_spec());
  return batch;
}

namespace {

class ShardFeed : public BatchFeed {
 public:
  explicit ShardFeed(std::vector<std::unique_ptr<BatchFeed>> feeds) : feeds_(std::move(feeds)) {}

  size_t shards() const override { return feeds_.size(); }
  void select(size_t shard) override { selected_ = shard; }
  void start(int64_t epoch, int64_t first_batch) override {
    for (const auto& feed : feeds_) feed->start(epoch, first_batch);
  }
  bool skip(int64_t samples) override {
    bool can = true;
    for (const auto& feed : feeds_) can = feed->skip(samples) && can;
    return can;
  }
  void move_to(c10::Device device) override {
    BatchFeed::move_to(device);
    for (const auto& feed : feeds_) feed->move_to(device);
  }
  void cast_to(at::ScalarType dtype) override {
    for (const auto& feed : feeds_) feed->cast_to(dtype);
  }

  int64_t batches_per_epoch() const override { return selected().batches_per_epoch(); }
  int64_t samples_per_batch() const override { return selected().samples_per_batch(); }
  bool next() override { return selected().next(); }
  bool next_without_padding() override {
    const bool has_next = selected().next_without_padding();
    has_samples_ = selected().has_samples();
    return has_next;
  }
  void take_example() override { selected().take_example(); }
  AnyBatch batch() const override { return selected().batch(); }
  at::Tensor example_input() const override { return selected().example_input(); }
  const SamplerOptions* sampler() const override { return feeds_.front()->sampler(); }

 private:
  BatchFeed& selected() const { return *feeds_[selected_]; }

  std::vector<std::unique_ptr<BatchFeed>> feeds_;
  size_t selected_ = 0;
};

}  // namespace

std::unique_ptr<BatchFeed> feed_of_shards(std::vector<std::unique_ptr<BatchFeed>> feeds) {
  if (feeds.empty())
    throw UsageError("a Trainer was given an empty list of loaders",
                     "give one loader, or one for each of this rank's logical shards");
  return std::make_unique<ShardFeed>(std::move(feeds));
}

bool drop_padding(Batch& batch) {
  const int64_t rows = batch.size() - batch.padding;
  if (rows == 0 || batch.padding == 0) return rows > 0;
  batch.data = batch.data.narrow(0, 0, rows);
  batch.target = batch.target.narrow(0, 0, rows);
  batch.padding = 0;
  return true;
}

}  // namespace lockstep::detail
