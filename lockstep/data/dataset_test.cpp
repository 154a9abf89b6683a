#include "lockstep/data/dataset.h"

#include <ATen/TensorOperators.h>

#include <cstdlib>

#include "lockstep/base/file.h"
#include "lockstep/base/hash.h"
#include "tests/support/test_files.h"

namespace lockstep {
namespace dataset_test {

using test_files::complaint;
using testing::AllOf;
using testing::HasSubstr;

std::string md5_of(const at::Tensor& tensor) {
  return md5_hex({static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()});
}

TEST(Dataset, UnknownNameGetsTheNearestOne) {
  EXPECT_THAT(complaint<UsageError>([] { load_dataset("mnits"); }),
              HasSubstr("unknown data set 'mnits'; did you mean 'mnist'?"));
  EXPECT_THAT(complaint<UsageError>([] { load_dataset("file:"); }), HasSubstr("names no file"));
  EXPECT_THAT(complaint<UsageError>([] { load_dataset("imagenet"); }),
              HasSubstr("mnist, fashion-mnist, cifar10, digits, random"));
  EXPECT_THAT(dataset_names(),
              testing::ElementsAre("mnist", "fashion-mnist", "cifar10", "digits", "random"));
}

TEST(Dataset, DigitsAreTheSameForTheSameSeed) {
  const DatasetOptions small{.digits_train = 30, .digits_test = 10};
  const DatasetSplits splits = load_dataset("digits", small);
  EXPECT_EQ(splits.train.name, "digits");
  EXPECT_EQ(splits.train.num_classes, 10);
  EXPECT_EQ(splits.train.data.sizes(), (std::vector<int64_t>{30, 28, 28}));
  EXPECT_EQ(splits.train.data.scalar_type(), at::kByte);
  EXPECT_EQ(splits.train.targets.scalar_type(), at::kLong);
  EXPECT_EQ(splits.train.targets.sizes(), (std::vector<int64_t>{30}));
  EXPECT_EQ(splits.test.size(), 10);
  EXPECT_TRUE(load_dataset("digits", small).train.data.equal(splits.train.data));
  DatasetOptions other = small;
  other.data_seed = 1;
  EXPECT_FALSE(load_dataset("digits", other).train.data.equal(splits.train.data));
}

TEST(Dataset, DigitsHeldOutAreNoneOfThoseLearned) {
  const DatasetSplits splits = load_dataset("digits", {.digits_train = 100, .digits_test = 50});
  for (int64_t i = 0; i < splits.test.size(); ++i) {
    EXPECT_FALSE((splits.train.data == splits.test.data[i]).flatten(1).all(1).any().item<bool>());
  }
}

// The checksums are of what Python's torch 2.13.0 drew for
// [(torch.rand(20), torch.rand(1)) for _ in range(2304)] after torch.manual_seed(0), and of the
// data alone for seed 7.
TEST(Dataset, RandomIsWhatPythonDraws) {
  const DatasetSplits splits = load_dataset("random");
  ASSERT_EQ(splits.train.data.sizes(), (std::vector<int64_t>{2048, 20}));
  ASSERT_EQ(splits.train.targets.sizes(), (std::vector<int64_t>{2048, 1}));
  EXPECT_EQ(splits.train.num_classes, 0);
  EXPECT_EQ(splits.train.data[0][0].item<float>(), 0.49625658988952637f);
  EXPECT_EQ(splits.train.targets[0][0].item<float>(), 0.6816085577011108f);
  EXPECT_EQ(md5_of(splits.train.data), "121baed558463c032f4a11f5e7ae580c");
  EXPECT_EQ(md5_of(splits.train.targets), "48d34c5cbe010134fff64fe93eef5922");
  EXPECT_EQ(md5_of(splits.test.data), "1747b3250e964f2c8462e02d4d2dffba");
  EXPECT_EQ(md5_of(load_dataset("random", {.data_seed = 7}).train.data),
            "b82dceedb3e3cd7519dbbf45da2ec956");
}

TEST(Dataset, SizesMustBePositive) {
  EXPECT_THAT(complaint<UsageError>([] { load_dataset("digits", {.digits_train = 0}); }),
              HasSubstr("digits_train is 0; expected at least 1"));
  EXPECT_THAT(complaint<UsageError>([] { load_dataset("random", {.random_test = -1}); }),
              HasSubstr("random_test is -1"));
}

TEST(Dataset, OfASetWithATestPartNoFractionIsTaken) {
  for (const std::string& name : dataset_names())
    EXPECT_THAT(complaint<UsageError>([&] { load_dataset(name, {.test_fraction = 0.2}); }),
                HasSubstr(name + " has a test part"));
}

TEST(Dataset, FolderComesFromTheEnvironmentWhenNotGiven) {
  const TemporaryDirectory folder;
  test_files::SmallMnist().write(folder.path() / "mnist", true);
  const char* before = std::getenv("LOCKSTEP_DATA_DIR");
  const std::string saved = before ? before : "";
  ::setenv("LOCKSTEP_DATA_DIR", folder.path().c_str(), 1);
  EXPECT_EQ(load_dataset("mnist").train.size(), 6);
  if (before) {
    ::setenv("LOCKSTEP_DATA_DIR", saved.c_str(), 1);
  } else {
    ::unsetenv("LOCKSTEP_DATA_DIR");
  }
}

}  // namespace dataset_test
}  // namespace lockstep
