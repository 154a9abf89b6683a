#include "lockstep/data/torch_dataset.h"

#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>
#include <torch/data/datasets/map.h>
#include <torch/data/samplers/distributed.h>
#include <torch/data/transforms/stack.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <memory>
#include <sstream>

#include "lockstep/base/error.h"

namespace lockstep {
namespace torch_sampler_test {

using ::testing::HasSubstr;
using Indices = std::vector<int64_t>;

/// What a World looks like here.
struct Place {
  int rank() const { return rank_; }
  int size() const { return size_; }
  int rank_, size_;
};

/// Sample i is the number i.
class Numbers : public torch::data::datasets::Dataset<Numbers> {
 public:
  explicit Numbers(size_t size) : size_(size) {}
  torch::data::Example<> get(size_t index) override {
    const auto i = static_cast<int64_t>(index);
    return {at::full({1}, i, at::kLong), at::scalar_tensor(i, at::kLong)};
  }
  std::optional<size_t> size() const override { return size_; }

 private:
  size_t size_;
};

template <class Loader>
Indices pass(Loader& loader) {
  Indices seen;
  for (auto& batch : *loader) {
    for (int64_t i = 0; i < batch.target.size(0); ++i)
      seen.push_back(batch.target[i].template item<int64_t>());
  }
  return seen;
}

Indices expected(int64_t epoch, int rank, uint64_t seed = 0, bool shuffle = true) {
  return DistributedSampler(
             {.dataset_size = 23, .rank = rank, .world_size = 2, .shuffle = shuffle, .seed = seed})
      .indices(epoch);
}

TEST(TorchSampler, EachPassOfLibTorchsLoaderIsTheNextEpoch) {
  for (const int rank : {0, 1}) {
    const auto data = Numbers(23).map(torch::data::transforms::Stack<>());
    auto loader =
        torch::data::make_data_loader(data, torch_sampler(data.size(), Place{rank, 2}), 4);
    for (int64_t epoch = 0; epoch < 3; ++epoch) EXPECT_EQ(pass(loader), expected(epoch, rank));
  }
  EXPECT_NE(expected(0, 0), expected(1, 0));
}

TEST(TorchSampler, APassThatIsGivenUpCountsToo) {
  const auto data = Numbers(23).map(torch::data::transforms::Stack<>());
  auto loader = torch::data::make_data_loader(data, torch_sampler(size_t{23}, Place{1, 2}), 4);
  EXPECT_EQ((*loader->begin()).target[0].item<int64_t>(), expected(0, 1)[0]);
  EXPECT_EQ(pass(loader), expected(1, 1));
}

TEST(TorchSampler, WorkersGetTheSameSamples) {
  const auto data = Numbers(23).map(torch::data::transforms::Stack<>());
  auto loader = torch::data::make_data_loader(
      data, torch_sampler(data.size(), Place{0, 2}, {.seed = 7}),
      torch::data::DataLoaderOptions(4).workers(2));  // In order, by default.
  EXPECT_EQ(pass(loader), expected(0, 0, 7));
  EXPECT_EQ(pass(loader), expected(1, 0, 7));
}

TEST(TorchSampler, DoesNotShuffleWhereToldSo) {
  TorchSampler sampler = torch_sampler(23, Place{1, 2}, {.shuffle = false});
  sampler.reset();
  const auto all = sampler.next(100);
  ASSERT_TRUE(all);
  EXPECT_EQ(Indices(all->begin(), all->end()), expected(0, 1, 0, false));
  EXPECT_FALSE(sampler.next(100));
}

/// Why there is one of our own.
TEST(TorchSampler, LibTorchsOwnRepeatsItsOrder) {
  const auto data = Numbers(23).map(torch::data::transforms::Stack<>());
  auto loader = torch::data::make_data_loader(
      data, torch::data::samplers::DistributedRandomSampler(23, 2, 0), 4);
  const Indices first = pass(loader);
  EXPECT_EQ(pass(loader), first);
}

TEST(TorchSampler, BeginsAtAnEpochThatIsSet) {
  TorchSampler sampler = torch_sampler(23, Place{0, 2});
  EXPECT_EQ(sampler.epoch(), -1);
  sampler.set_epoch(5);
  sampler.reset();
  EXPECT_EQ(sampler.epoch(), 5);
  EXPECT_EQ(sampler.next(1)->front(), static_cast<size_t>(expected(5, 0)[0]));
  EXPECT_THROW(sampler.set_epoch(-1), UsageError);
}

TEST(TorchSampler, GoesOnWhereItWasSaved) {
  TorchSampler sampler = torch_sampler(23, Place{0, 2});
  sampler.reset();
  sampler.reset();
  sampler.next(5);
  torch::serialize::OutputArchive out;
  sampler.save(out);
  std::stringstream bytes;
  out.save_to(bytes);
  torch::serialize::InputArchive in;
  in.load_from(bytes);
  TorchSampler again = torch_sampler(23, Place{0, 2});
  again.load(in);
  EXPECT_EQ(again.epoch(), 1);
  EXPECT_EQ(again.next(4), sampler.next(4));
  again.reset();
  EXPECT_EQ(again.epoch(), 2);
}

TEST(TorchSampler, TakesANewSize) {
  TorchSampler sampler = torch_sampler(23, Place{0, 2});
  sampler.reset(4);
  EXPECT_EQ(sampler.samples_per_rank(), 2);
  EXPECT_EQ(sampler.next(9)->size(), 2);
}

TEST(TorchSampler, TakesSizesOfAnyTypeWithoutANarrowing) {
  const size_t size = 23;
  const Place world{1, 2};
  const DistributedSampler sampler({size, world.rank(), world.size()});  // -Wnarrowing otherwise.
  EXPECT_EQ(sampler.indices(0), expected(0, 1));
  EXPECT_EQ(sampler.options().dataset_size, 23);
}

TEST(TorchSampler, RefusesADataSetWithoutASize) {
  try {
    torch_sampler(std::nullopt, Place{0, 2});
    FAIL() << "no UsageError";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("a data set of 0 samples, expected at least 1"));
  }
}

}  // namespace torch_sampler_test
}  // namespace lockstep
