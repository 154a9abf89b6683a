#include "lockstep/data/named_sets.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <sys/stat.h>

#include "lockstep/base/file.h"
#include "lockstep/data/safetensors.h"
#include "tests/support/test_files.h"

namespace lockstep {
namespace tensor_files_test {

namespace fs = std::filesystem;
using test_files::complaint;
using test_files::npy;
using test_files::zip;
using testing::AllOf;
using testing::HasSubstr;

class TensorFiles : public testing::Test {
 protected:
  fs::path saved(const StateDict& tensors) {
    const fs::path path = folder_.path() / "x.safetensors";
    save_safetensors(path, tensors);
    return path;
  }
  DatasetSplits load(const fs::path& path, std::optional<double> test_fraction = {}) {
    return load_dataset("file:" + path.string(), {.test_fraction = test_fraction});
  }
  template <typename E = DataError>
  std::string complaint_about(const StateDict& tensors, std::optional<double> test_fraction = {}) {
    const fs::path path = saved(tensors);
    return complaint<E>([&] { load(path, test_fraction); });
  }
  TemporaryDirectory folder_;
};

at::Tensor rows(int64_t count) {
  return at::arange(count * 2, at::kFloat).reshape({count, 2});
}
at::Tensor labels(int64_t count) {
  return at::arange(count, at::kLong).remainder(3);
}

TEST_F(TensorFiles, HoldsOutTheLastRowsWithoutATestPart) {
  const DatasetSplits splits = load(saved({{"data", rows(20)}, {"targets", labels(20)}}), 0.25);
  EXPECT_EQ(splits.train.size(), 15);
  EXPECT_TRUE(splits.test.data.equal(rows(20).slice(0, 15)));
  EXPECT_TRUE(splits.test.targets.equal(labels(20).slice(0, 15)));
  EXPECT_EQ(splits.train.num_classes, 3);
  EXPECT_TRUE(splits.test.data.is_contiguous());
  EXPECT_THAT(splits.train.name, HasSubstr("file:/"));
  EXPECT_EQ(load(saved({{"x", rows(2)}, {"y", labels(2)}}), 0.01).test.size(), 1);
}

TEST_F(TensorFiles, TakesTheTestPartOfTheFile) {
  const DatasetSplits splits = load(saved({{"images", at::zeros({4, 5, 5}, at::kByte)},
                                           {"labels", at::tensor({0, 1, 2, 1}, at::kByte)},
                                           {"test_images", at::zeros({2, 5, 5}, at::kByte)},
                                           {"test_labels", at::tensor({6, 1}, at::kByte)}}));
  EXPECT_EQ(splits.train.size(), 4);
  EXPECT_EQ(splits.test.size(), 2);
  EXPECT_EQ(splits.train.num_classes, 7) << "classes of both parts count";
  EXPECT_EQ(splits.train.targets.scalar_type(), at::kLong);
}

TEST_F(TensorFiles, FloatTargetsAreRegression) {
  const DatasetSplits splits = load(saved({{"x", rows(10)}, {"y", at::arange(10, at::kDouble)}}));
  EXPECT_EQ(splits.train.num_classes, 0);
  EXPECT_EQ(splits.train.targets.scalar_type(), at::kFloat);
  EXPECT_EQ(splits.train.targets.sizes(), (std::vector<int64_t>{9, 1}));
}

TEST_F(TensorFiles, ReadsArchivesAndFoldersOfArrays) {
  const std::string data = npy("{'descr': '|u1', 'fortran_order': False, 'shape': (4, 1)}", "abcd");
  const std::string targets = npy("{'descr': '|u1', 'fortran_order': False, 'shape': (4,)}",
                                  std::string_view("\0\1\0\1", 4));
  const fs::path archive = folder_.path() / "keras.npz";
  test_files::write(archive, zip({{"x_train.npy", data, true},
                                  {"y_train.npy", targets, true},
                                  {"x_test.npy", data, false},
                                  {"y_test.npy", targets, false}}));
  EXPECT_EQ(load(archive).test.size(), 4);
  const fs::path arrays = folder_.path() / "arrays";
  fs::create_directory(arrays);
  test_files::write(arrays / "data.npy", data);
  test_files::write(arrays / "targets.npy", targets);
  test_files::write(arrays / "README", "not an array");
  const DatasetSplits splits = load(arrays);
  EXPECT_EQ(splits.train.size(), 3);
  EXPECT_EQ(splits.test.data[0][0].item<int>(), 'd');
}

/// A pipe that nobody writes to, in whose place a file was meant.
TEST_F(TensorFiles, APipeIsRefusedAndNotWaitedFor) {
  const fs::path pipe = folder_.path() / "pipe.safetensors";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(complaint<DataError>([&] { load(pipe); }),
              HasSubstr("pipe.safetensors is no file; expected a regular file"));
}

TEST_F(TensorFiles, PathsThatCannotBeADataSet) {
  EXPECT_THAT(complaint<DataError>([&] { load(folder_.path() / "nothing.npz"); }),
              HasSubstr("nothing.npz: there is no such file or folder"));
  test_files::write(folder_.path() / "x.csv", "1,2");
  EXPECT_THAT(complaint<UsageError>([&] { load(folder_.path() / "x.csv"); }),
              HasSubstr("the extension '.csv'; expected a .safetensors or .npz"));
  test_files::write(folder_.path() / "x.npy", "");
  EXPECT_THAT(complaint<UsageError>([&] { load(folder_.path() / "x.npy"); }),
              HasSubstr("one array; expected data and targets"));
  EXPECT_THAT(complaint<DataError>([&] {
                fs::create_directory(folder_.path() / "bare");
                load(folder_.path() / "bare");
              }),
              HasSubstr("it has none"));
}

TEST_F(TensorFiles, PairsThatDoNotFit) {
  EXPECT_THAT(complaint_about({{"weight", rows(2)}}), HasSubstr("it has weight"));
  EXPECT_THAT(complaint_about({{"data", rows(2)}}), HasSubstr("has data but no targets"));
  EXPECT_THAT(complaint_about({{"data", rows(3)}, {"targets", labels(2)}}),
              HasSubstr("the train part has 3 rows of data and 2 rows of targets"));
  EXPECT_THAT(complaint_about({{"data", rows(0)}, {"targets", labels(0)}}),
              HasSubstr("0 rows of data"));
  EXPECT_THAT(complaint_about({{"data", at::ones({})}, {"targets", labels(1)}}),
              HasSubstr("no rows of data"));
  EXPECT_THAT(complaint_about({{"data", rows(1)}, {"targets", labels(1)}}),
              HasSubstr("one sample only"));
  EXPECT_THAT(complaint_about({{"data", rows(3)}, {"targets", labels(3) - 1}}),
              HasSubstr("the target of sample 0 is -1; expected a class index"));
  EXPECT_THAT(complaint_about({{"data", rows(3)}, {"targets", at::zeros({3, 2}, at::kLong)}}),
              HasSubstr("targets of 2 dimensions"));
  EXPECT_THAT(complaint_about({{"data", rows(3)},
                               {"targets", labels(3)},
                               {"test_data", at::zeros({2, 7})},
                               {"test_targets", labels(2)}}),
              HasSubstr("train and test parts differ"));
  EXPECT_THAT(complaint_about({{"data", rows(3)}, {"targets", labels(3)}, {"test_data", rows(3)}}),
              HasSubstr("has test_data but no test_targets"));
  EXPECT_THAT(complaint_about<UsageError>({{"data", rows(3)}, {"targets", labels(3)}}, 1.0),
              HasSubstr("test_fraction is 1.0"));
  EXPECT_THAT(complaint_about<UsageError>({{"data", rows(3)},
                                           {"targets", labels(3)},
                                           {"test_data", rows(2)},
                                           {"test_targets", labels(2)}},
                                          0.5),
              HasSubstr("has a test part"));
}

}  // namespace tensor_files_test
}  // namespace lockstep
