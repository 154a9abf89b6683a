#include "lockstep/data/loader.h"

#include <ATen/Context.h>
#include <ATen/ops/_efficientzerotensor.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/set.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ParallelGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/error.h"
#include "tests/support/message_of.h"

namespace lockstep {
namespace loader_test {

using test::message_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Image i holds the byte i % 251 at every pixel but the first two, which tell i apart; target i.
TensorDataset numbered_images(int64_t count) {
  TensorDataset dataset;
  dataset.name = "numbered";
  const at::Tensor numbers = at::arange(count, at::kLong);
  dataset.data = at::zeros({count, 6, 5}, at::kByte);
  dataset.data.add_(numbers.remainder(251).to(at::kByte).view({count, 1, 1}));
  dataset.data.select(1, 0).select(1, 0).copy_(numbers.remainder(256));
  dataset.data.select(1, 0).select(1, 1).copy_(numbers.div(256, "floor"));
  dataset.targets = numbers;
  dataset.num_classes = count;
  return dataset;
}

DistributedSampler sampler_for(int64_t size, bool shuffle = true) {
  return DistributedSampler({.dataset_size = size, .shuffle = shuffle, .seed = 7});
}

struct Copied {
  std::vector<at::Tensor> data;
  std::vector<at::Tensor> target;
  std::vector<int64_t> index;
  std::vector<int64_t> padding;

  void add(const Batch& batch) {
    data.push_back(batch.data.clone());
    target.push_back(batch.target.clone());
    index.push_back(batch.index);
    padding.push_back(batch.padding);
  }
};

Copied copy_of(DataLoader::Epoch epoch) {
  Copied copied;
  for (const Batch& batch : epoch) copied.add(batch);
  return copied;
}

void expect_equal(const Copied& a, const Copied& b) {
  EXPECT_EQ(a.index, b.index);
  EXPECT_EQ(a.padding, b.padding);
  ASSERT_EQ(a.data.size(), b.data.size());
  for (size_t i = 0; i < a.data.size(); ++i) {
    EXPECT_TRUE(at::equal(a.data[i], b.data[i])) << "batch " << i;
    EXPECT_TRUE(at::equal(a.target[i], b.target[i])) << "batch " << i;
  }
}

int count_threads() {
  int count = 0;
  for ([[maybe_unused]] const auto& task : std::filesystem::directory_iterator("/proc/self/task"))
    ++count;
  return count;
}

/// A joined thread still stands in /proc for a moment: the kernel wakes who joins it before it
/// takes it off the list. So this waits for the number, and gives what it last saw.
int count_threads_once_at_most(int expected) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (count_threads() > expected && std::chrono::steady_clock::now() < deadline)
    std::this_thread::yield();
  return count_threads();
}

Compose augmentation() {
  return {random_crop({.padding = 2}), random_horizontal_flip(), random_rotation({.degrees = 30}),
          normalize(), flatten()};
}

TEST(DataLoader, BatchesAreTheSamplersRows) {
  const TensorDataset dataset = numbered_images(1000);
  const DistributedSampler sampler({.dataset_size = 1000, .rank = 1, .world_size = 3, .seed = 4});
  DataLoader loader(dataset, sampler, {normalize()}, {.batch_size = 32});
  EXPECT_EQ(loader.batches_per_epoch(), 11);
  EXPECT_EQ(loader.samples_per_epoch(), 334);
  EXPECT_EQ(loader.data_spec(), (SampleSpec{{1, 6, 5}, at::kFloat}));
  for (int64_t epoch : {0, 3}) {
    const Copied copied = copy_of(loader.epoch(epoch));
    ASSERT_EQ(copied.data.size(), 11U);
    EXPECT_EQ(copied.data.back().size(0), 334 - 320);
    const at::Tensor order = at::tensor(sampler.indices(epoch));
    EXPECT_TRUE(at::equal(at::cat(copied.target), order));
    const at::Tensor expected =
        dataset.data.index_select(0, order).unsqueeze(1).to(at::kFloat).div(255);
    EXPECT_TRUE(at::equal(at::cat(copied.data), expected.sub(0.1307F).div_(0.3081F)));
  }
}

TEST(DataLoader, FloatFeaturesAndTargetsPassAsTheyAre) {
  TensorDataset dataset{"regression", at::rand({50, 20}), at::rand({50, 3}), 0};
  DataLoader loader(dataset, sampler_for(50), {}, {.batch_size = 16});
  const Copied copied = copy_of(loader.epoch(1));
  const at::Tensor order = at::tensor(sampler_for(50).indices(1));
  EXPECT_TRUE(at::equal(at::cat(copied.data), dataset.data.index_select(0, order)));
  EXPECT_TRUE(at::equal(at::cat(copied.target), dataset.targets.index_select(0, order)));
}

TEST(DataLoader, OddRowsAndNoRowsDimensionsWork) {
  // 3-byte rows, and scalars as samples.
  TensorDataset bytes{"bytes", at::randint(256, {20, 3}, at::kByte), at::arange(20), 20};
  DataLoader three(bytes, sampler_for(20, false), {}, {.batch_size = 20});
  EXPECT_TRUE(at::equal(copy_of(three.epoch(0)).data.at(0), bytes.data));
  TensorDataset scalars{"scalars", at::rand({20}), at::rand({20}), 0};
  DataLoader one(scalars, sampler_for(20, false), {}, {.batch_size = 20});
  EXPECT_TRUE(at::equal(copy_of(one.epoch(0)).data.at(0), scalars.data));
  const at::Tensor shorts = at::arange(20).to(at::kUInt16);
  DataLoader unsigned_ones(TensorDataset{"unsigned", shorts, shorts, 0}, sampler_for(20, false));
  EXPECT_TRUE(at::equal(copy_of(unsigned_ones.epoch(0)).data.at(0), shorts));
}

TEST(DataLoader, WorkersDoNotChangeTheResult) {
  const TensorDataset dataset = numbered_images(500);
  const auto run = [&](int workers, int prefetch) {
    DataLoader loader(dataset, sampler_for(500), augmentation(),
                      {.batch_size = 16, .num_workers = workers, .prefetch = prefetch, .seed = 9});
    Copied copied;
    for (int64_t epoch = 0; epoch < 3; ++epoch) {
      for (const Batch& batch : loader.epoch(epoch)) copied.add(batch);
    }
    return copied;
  };
  const Copied alone = run(0, 1);
  expect_equal(alone, run(1, 1));
  expect_equal(alone, run(3, 2));
  expect_equal(alone, run(40, 1));  // more threads than batches
}

TEST(DataLoader, RanksDoNotChangeASamplesTransform) {
  const TensorDataset dataset = numbered_images(100);
  DataLoader whole(dataset, sampler_for(100), augmentation(), {.batch_size = 100, .seed = 2});
  const Copied all = copy_of(whole.epoch(5));
  const at::Tensor order = at::tensor(sampler_for(100).indices(5));
  EXPECT_TRUE(at::equal(all.data.at(0), augmentation()(dataset.data, 2, 5).index_select(0, order)));
  for (int rank = 0; rank < 2; ++rank) {
    const DistributedSampler half({.dataset_size = 100, .rank = rank, .world_size = 2, .seed = 7});
    DataLoader loader(dataset, half, augmentation(), {.batch_size = 50, .seed = 2});
    const Copied part = copy_of(loader.epoch(5));
    EXPECT_TRUE(at::equal(part.data.at(0), all.data.at(0).slice(0, rank, 100, 2)));
  }
}

TEST(DataLoader, ResumesInTheMiddleOfAnEpoch) {
  const TensorDataset dataset = numbered_images(203);
  for (int workers : {0, 2}) {
    const LoaderOptions options{.batch_size = 20, .num_workers = workers, .seed = 1};
    DataLoader loader(dataset, sampler_for(203), augmentation(), options);
    const Copied whole = copy_of(loader.epoch(2));
    for (int64_t taken : {0, 1, 5, 10, 11}) {
      DataLoader interrupted(dataset, sampler_for(203), augmentation(), options);
      interrupted.epoch(2);
      Copied both;
      Batch batch;
      for (int64_t i = 0; i < taken; ++i) {
        ASSERT_TRUE(interrupted.next(batch));
        both.add(batch);
      }
      const SamplerState state = interrupted.state();
      EXPECT_EQ(state, (SamplerState{2, std::min<int64_t>(taken * 20, 203)}));
      DataLoader resumed(dataset, sampler_for(203), augmentation(), options);
      for (const Batch& rest : resumed.resume(state)) both.add(rest);
      expect_equal(whole, both);
    }
  }
}

TEST(DataLoader, AnEpochCanStartAtABatchAndEndEarly) {
  const TensorDataset dataset = numbered_images(100);
  for (int workers : {0, 3}) {
    const int before = count_threads();
    DataLoader loader(dataset, sampler_for(100), {normalize()},
                      {.batch_size = 10, .num_workers = workers});
    const Copied whole = copy_of(loader.epoch(1));
    Batch batch;
    loader.epoch(0);
    ASSERT_TRUE(loader.next(batch));
    loader.epoch(1, 7);  // ends epoch 0 after its first batch
    for (int64_t expected = 7; expected < 10; ++expected) {
      ASSERT_TRUE(loader.next(batch));
      EXPECT_EQ(batch.index, expected);
      EXPECT_TRUE(at::equal(batch.data, whole.data[expected]));
    }
    EXPECT_FALSE(loader.next(batch));
    EXPECT_FALSE(batch.data.defined());
    EXPECT_FALSE(loader.next(batch)) << "an epoch that is over stays over";
    EXPECT_LE(count_threads_once_at_most(before), before) << "workers outlive their epoch";
    loader.epoch(1, 10);
    EXPECT_FALSE(loader.next(batch));
  }
}

TEST(DataLoader, AnEpochOfWhichAllIsSkippedHasNoBatch) {
  for (const int workers : {0, 2}) {
    const DistributedSampler sampler({.dataset_size = 20, .world_size = 2, .skip = 20});
    DataLoader loader(numbered_images(20), sampler, {}, {.batch_size = 4, .num_workers = workers});
    EXPECT_EQ(loader.batches_per_epoch(), 0);
    for ([[maybe_unused]] const Batch& batch : loader.epoch(0)) ADD_FAILURE();
  }
}

TEST(DataLoader, SkipsAsItsSamplerWould) {
  for (const int workers : {0, 2}) {
    const SamplerOptions all{.dataset_size = 20, .rank = 1, .world_size = 2};
    SamplerOptions rest = all;
    rest.skip = 7;
    const LoaderOptions options{.batch_size = 4, .num_workers = workers};
    DataLoader loader(numbered_images(20), DistributedSampler(all), {}, options);
    DataLoader expected(numbered_images(20), DistributedSampler(rest), {}, options);
    loader.epoch(1, 1);
    loader.skip(7);
    Batch batch;
    EXPECT_FALSE(loader.next(batch)) << "the epoch in progress has ended";
    EXPECT_EQ(loader.batches_per_epoch(), expected.batches_per_epoch());
    loader.epoch(1);
    for (const Batch& other : expected.epoch(1)) {
      ASSERT_TRUE(loader.next(batch));
      EXPECT_TRUE(batch.data.equal(other.data));
    }
    EXPECT_FALSE(loader.next(batch));
    loader.skip(0);
    EXPECT_EQ(loader.batches_per_epoch(), 3);
  }
}

TEST(DataLoader, NothingComesBeforeTheFirstEpoch) {
  DataLoader loader(numbered_images(10), sampler_for(10));
  Batch batch;
  EXPECT_FALSE(loader.next(batch));
}

TEST(DataLoader, StopsAtAnyMomentWithoutLeavingThreads) {
  const TensorDataset dataset = numbered_images(400);
  const int before = count_threads();
  for (int taken = 0; taken < 20; ++taken) {
    DataLoader loader(dataset, sampler_for(400), augmentation(),
                      {.batch_size = 8, .num_workers = 3});
    loader.epoch(taken);
    EXPECT_GT(count_threads(), before);
    Batch batch;
    for (int i = 0; i < taken; ++i) ASSERT_TRUE(loader.next(batch));
  }
  EXPECT_LE(count_threads_once_at_most(before), before);
}

TEST(DataLoader, CanBeMovedInMidEpoch) {
  const TensorDataset dataset = numbered_images(100);
  DataLoader first(dataset, sampler_for(100), {}, {.batch_size = 10, .num_workers = 2});
  const Copied whole = copy_of(first.epoch(0));
  first.epoch(0);
  Batch batch;
  ASSERT_TRUE(first.next(batch));
  DataLoader second = std::move(first);
  ASSERT_TRUE(second.next(batch));
  EXPECT_TRUE(at::equal(batch.target, whole.target[1]));
}

TEST(DataLoader, NeverOverwritesABatchThatIsHeld) {
  const TensorDataset dataset = numbered_images(320);
  for (int workers : {0, 2}) {
    DataLoader loader(dataset, sampler_for(320), {normalize()},
                      {.batch_size = 16, .num_workers = workers});
    std::vector<Batch> held;
    std::vector<at::Tensor> views;
    Copied copied;
    for (const Batch& batch : loader.epoch(0)) {
      copied.add(batch);
      if (batch.index % 2 == 0) held.push_back(batch);
      views.push_back(batch.data.select(0, 3));
      // Knows the memory alone, not the tensor that the loader gave out.
      if (batch.index % 3 == 0) views.back() = at::empty({0}).set_(views.back());
    }
    ASSERT_EQ(copied.data.size(), 20U);
    for (const Batch& batch : held)
      EXPECT_TRUE(at::equal(batch.data, copied.data[batch.index])) << batch.index;
    for (size_t i = 0; i < views.size(); ++i)
      EXPECT_TRUE(at::equal(views[i], copied.data[i].select(0, 3))) << i;
  }
}

TEST(DataLoader, BatchesMadeInInferenceModeAreOrdinaryTensors) {
  DataLoader loader(numbered_images(32), sampler_for(32), {normalize()}, {.batch_size = 16});
  Batch batch;
  {
    const c10::InferenceMode guard;
    loader.epoch(0);
    ASSERT_TRUE(loader.next(batch));
  }
  EXPECT_FALSE(batch.data.is_inference());
  EXPECT_FALSE(batch.target.is_inference());
}

TEST(DataLoader, CountsThePaddingOfTheLastBatch) {
  const TensorDataset dataset = numbered_images(10);
  for (int rank = 0; rank < 4; ++rank) {
    const DistributedSampler sampler(
        {.dataset_size = 10, .rank = rank, .world_size = 4, .shuffle = false});
    DataLoader loader(dataset, sampler, {}, {.batch_size = 2});
    EXPECT_EQ(copy_of(loader.epoch(0)).padding, (std::vector<int64_t>{0, rank >= 2 ? 1 : 0}));
    DataLoader whole(dataset, sampler, {}, {.batch_size = 8});
    EXPECT_EQ(copy_of(whole.epoch(0)).padding, (std::vector<int64_t>{rank >= 2 ? 1 : 0}));
    DataLoader dropping(dataset, sampler, {}, {.batch_size = 2, .drop_last = true});
    EXPECT_EQ(copy_of(dropping.epoch(0)).padding, std::vector<int64_t>{0});
    EXPECT_EQ(dropping.samples_per_epoch(), 2);
  }
}

TEST(DataLoader, ABatchLargerThanTheDataIsOneShortBatch) {
  const TensorDataset dataset = numbered_images(10);
  DataLoader loader(dataset, sampler_for(10, false), {}, {.batch_size = 1000});
  const Copied copied = copy_of(loader.epoch(0));
  ASSERT_EQ(copied.data.size(), 1U);
  EXPECT_TRUE(at::equal(copied.target[0], dataset.targets));
}

TEST(DataLoader, NamesWhatDoesNotFit) {
  const TensorDataset dataset = numbered_images(10);
  const auto make = [&](LoaderOptions options, SamplerOptions sampler, Compose transforms = {}) {
    return message_of([&] {
      DataLoader loader(dataset, DistributedSampler(sampler), std::move(transforms), options);
    });
  };
  EXPECT_THAT(make({.batch_size = 11, .drop_last = true}, {.dataset_size = 10}),
              AllOf(HasSubstr("batch of 11 is larger than the data"),
                    HasSubstr("10 of the 10 samples of 'numbered'"),
                    HasSubstr("batch size to at most 10")));
  EXPECT_THAT(make({.drop_last = true}, {.dataset_size = 10, .world_size = 11, .drop_last = true}),
              HasSubstr("use fewer ranks"));
  EXPECT_THAT(make({.drop_last = false}, {.dataset_size = 10, .world_size = 11, .drop_last = true}),
              HasSubstr("use fewer ranks"));
  EXPECT_THAT(make({.batch_size = 0}, {.dataset_size = 10}), HasSubstr("batch_size is 0"));
  EXPECT_THAT(make({.num_workers = -1}, {.dataset_size = 10}), HasSubstr("num_workers is -1"));
  EXPECT_THAT(make({.prefetch = 0}, {.dataset_size = 10}), HasSubstr("prefetch is 0"));
  EXPECT_THAT(make({}, {.dataset_size = 9}), HasSubstr("has 10 samples, but the sampler is for 9"));
  EXPECT_THAT(make({}, {.dataset_size = 10}, {reshape({7})}),
              HasSubstr("reshape got samples of uint8 [6, 5]"));
  DataLoader loader(dataset, sampler_for(10), {}, {.batch_size = 4});
  EXPECT_THAT(message_of([&] { loader.epoch(1, 4); }), HasSubstr("batch 4: it has 3 batches"));
  EXPECT_THAT(message_of([&] { loader.epoch(1, -1); }), HasSubstr("batch -1"));
  EXPECT_THAT(message_of([&] { loader.resume({.epoch = 1, .position = 3}); }),
              HasSubstr("epoch 1 after 3 of this rank's 10 samples in batches of 4"));
  EXPECT_THAT(message_of([&] { loader.resume({.epoch = 1, .position = 12}); }),
              HasSubstr("after 12"));
}

TEST(DataLoader, RefusesTensorsThatItCannotGather) {
  const auto make = [](at::Tensor data, at::Tensor targets) {
    try {
      const int64_t size = data.defined() ? data.size(0) : 1;
      DataLoader loader(TensorDataset{"odd", data, targets, 0}, sampler_for(size));
    } catch (const DataError& error) {
      return std::string(error.what());
    }
    return std::string("no DataError");
  };
  EXPECT_THAT(make(at::rand({4, 6}).t(), at::arange(6)),
              HasSubstr("data has rows that are not contiguous"));
  EXPECT_THAT(make(at::_neg_view(at::rand({4, 6})), at::arange(4)),
              HasSubstr("data is lazily conjugated or negated"));
  EXPECT_THAT(make(at::rand({4, 6}), at::_efficientzerotensor({4}, at::kLong)),
              HasSubstr("targets is lazily"));
  EXPECT_THAT(make(at::rand({4, 6}), at::arange(5)), HasSubstr("4 samples, but 5 targets"));
  EXPECT_THAT(make(at::rand({4, 6}), at::Tensor()), HasSubstr("targets is missing"));
  EXPECT_THAT(make(at::empty({4}, at::TensorOptions().device(at::kMeta)), at::arange(4)),
              HasSubstr("data is on meta"));
}

TEST(DataLoader, PinsMemoryOrSaysWhyNot) {
  const auto make = [] {
    return DataLoader(numbered_images(10), sampler_for(10), {}, {.pin_memory = true});
  };
  if (!at::hasCUDA()) {
    EXPECT_THAT(message_of(make), HasSubstr("pin_memory needs a CUDA device"));
    return;
  }
  DataLoader loader = make();
  for (const Batch& batch : loader.epoch(0)) EXPECT_TRUE(batch.data.is_pinned());
}

/// Samples that are made when they are asked for; fails on one of them as often as told.
class FailingSource : public SampleSource {
 public:
  FailingSource(int64_t size, int64_t bad, std::shared_ptr<std::atomic<int>> failures)
      : size_(size), bad_(bad), failures_(std::move(failures)) {}
  std::string name() const override { return "failing"; }
  int64_t size() const override { return size_; }
  SampleSpec data_spec() const override { return {{2}, at::kFloat}; }
  SampleSpec target_spec() const override { return {{}, at::kLong}; }
  std::unique_ptr<SampleSource> clone() const override {
    return std::make_unique<FailingSource>(*this);
  }
  void read(std::span<const int64_t> indices, const at::Tensor& data,
            const at::Tensor& target) override {
    for (size_t i = 0; i < indices.size(); ++i) {
      if (indices[i] == bad_ && (*failures_)-- > 0) throw std::runtime_error("sample 23 is bad");
      data[i].fill_(indices[i]);
      target[i].fill_(indices[i]);
    }
  }

 private:
  int64_t size_;
  int64_t bad_;
  std::shared_ptr<std::atomic<int>> failures_;
};

TEST(DataLoader, WorkersLeaveSignalsAndOtherThreadsAlone) {
  std::atomic<int> term_blocked = 0;
  std::atomic<int> sequential = 0;
  std::atomic<int> calls = 0;
  const auto look = batch_transform("look", [&](const at::Tensor& batch) {
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    term_blocked += sigismember(&blocked, SIGTERM);
    sequential += c10::ParallelGuard::is_enabled();
    calls += batch.size(0) > 1;
    return batch;
  });
  sigset_t before;
  sigset_t after;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  DataLoader loader(numbered_images(100), sampler_for(100), {look},
                    {.batch_size = 10, .num_workers = 2});
  loader.epoch(0);
  pthread_sigmask(SIG_SETMASK, nullptr, &after);
  Batch batch;
  while (loader.next(batch)) continue;
  EXPECT_EQ(calls, 10);
  EXPECT_EQ(term_blocked, 10) << "a signal could interrupt a worker";
  EXPECT_EQ(sequential, 10) << "each worker would start threads of its own";
  EXPECT_EQ(sigismember(&after, SIGTERM), sigismember(&before, SIGTERM));
}

TEST(DataLoader, AWorkersErrorReachesItsBatchAndTheBatchCanBeTriedAgain) {
  for (int workers : {0, 2}) {
    DataLoader loader(
        std::make_unique<FailingSource>(60, 23, std::make_shared<std::atomic<int>>(1)),
        sampler_for(60, false), {}, {.batch_size = 10, .num_workers = workers});
    loader.epoch(0);
    Batch batch;
    ASSERT_TRUE(loader.next(batch));
    ASSERT_TRUE(loader.next(batch));
    try {
      loader.next(batch);
      FAIL() << "no error";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "sample 23 is bad");
    }
    EXPECT_EQ(loader.state(), (SamplerState{0, 20}));
    for (int64_t expected = 2; expected < 6; ++expected) {
      ASSERT_TRUE(loader.next(batch));
      EXPECT_EQ(batch.index, expected);
      EXPECT_EQ(batch.target[0].item<int64_t>(), expected * 10);
      EXPECT_EQ(batch.data[9][1].item<float>(), static_cast<float>(expected * 10 + 9));
    }
    EXPECT_FALSE(loader.next(batch));
  }
}

}  // namespace loader_test
}  // namespace lockstep
