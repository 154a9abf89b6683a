#include "lockstep/data/torch_dataset.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/data/datasets/base.h>
#include <torch/data/datasets/map.h>
#include <torch/data/datasets/shared.h>
#include <torch/data/transforms/stack.h>

#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/data/loader.h"

namespace lockstep {
namespace torch_dataset_test {

using ::testing::HasSubstr;

/// Sample i is a 2 x 3 image of the value i with target 10 i.
class Counting : public torch::data::datasets::Dataset<Counting> {
 public:
  explicit Counting(size_t size, int64_t odd_one = -1) : size_(size), odd_one_(odd_one) {}
  torch::data::Example<> get(size_t index) override {
    const auto i = static_cast<int64_t>(index);
    const int64_t width = i == odd_one_ ? 4 : 3;
    return {at::full({2, width}, i, at::kFloat), at::scalar_tensor(10 * i, at::kLong)};
  }
  std::optional<size_t> size() const override { return size_; }

 private:
  size_t size_;
  int64_t odd_one_;
};

DistributedSampler shuffled(int64_t size) {
  return DistributedSampler({.dataset_size = size, .seed = 3});
}

void expect_counting(DataLoader& loader, int64_t size) {
  EXPECT_EQ(loader.data_spec(), (SampleSpec{{6}, at::kFloat}));
  std::vector<at::Tensor> data;
  std::vector<at::Tensor> target;
  for (const Batch& batch : loader.epoch(2)) {
    data.push_back(batch.data.clone());
    target.push_back(batch.target.clone());
  }
  const at::Tensor order = at::tensor(shuffled(size).indices(2));
  EXPECT_TRUE(at::equal(at::cat(target), order * 10));
  EXPECT_TRUE(at::equal(at::cat(data), order.to(at::kFloat).view({size, 1}).expand({size, 6})));
}

TEST(TorchDataset, FeedsALoader) {
  for (int workers : {0, 3}) {
    DataLoader loader(torch_source(Counting(41)), shuffled(41), {flatten()},
                      {.batch_size = 8, .num_workers = workers});
    expect_counting(loader, 41);
  }
}

TEST(TorchDataset, FeedsALoaderWhenMappedByStack) {
  const auto mapped = Counting(41).map(torch::data::transforms::Stack<>());
  for (int workers : {0, 2}) {
    DataLoader loader(torch_source(mapped), shuffled(41), {flatten()},
                      {.batch_size = 8, .num_workers = workers});
    expect_counting(loader, 41);
  }
}

TEST(TorchDataset, FeedsALoaderWhenShared) {
  DataLoader loader(torch_source(torch::data::datasets::make_shared_dataset<Counting>(41)),
                    shuffled(41), {flatten()}, {.batch_size = 8});
  expect_counting(loader, 41);
}

TEST(TorchDataset, IsReadIntoMemory) {
  const TensorDataset dataset = load_torch_dataset(Counting(1500), "counting");
  EXPECT_EQ(dataset.name, "counting");
  EXPECT_EQ(dataset.data.sizes(), (std::vector<int64_t>{1500, 2, 3}));
  EXPECT_TRUE(at::equal(dataset.targets, at::arange(1500) * 10));
  EXPECT_EQ(dataset.num_classes, 14991);
  DataLoader loader(dataset, shuffled(1500), {flatten()}, {.batch_size = 64});
  expect_counting(loader, 1500);
}

TEST(TorchDataset, NamesTheSampleOfAnotherShape) {
  DataLoader loader(torch_source(Counting(20, 13), "counting"), shuffled(20), {},
                    {.batch_size = 20, .num_workers = 1});
  loader.epoch(0);
  Batch batch;
  try {
    loader.next(batch);
    FAIL() << "no DataError";
  } catch (const DataError& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("data set 'counting': the data of sample 13 is float32 [2, 4], but that "
                          "of sample 0 is float32 [2, 3]"));
  }
}

TEST(TorchDataset, RefusesAnEmptyOne) {
  EXPECT_THROW(torch_source(Counting(0)), DataError);
}

}  // namespace torch_dataset_test
}  // namespace lockstep
