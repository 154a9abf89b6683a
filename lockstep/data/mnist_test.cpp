#include "lockstep/data/named_sets.h"

#include <ATen/ops/sum.h>

#include <span>

#include "lockstep/base/env.h"
#include "lockstep/base/file.h"
#include "lockstep/base/hash.h"
#include "tests/support/test_files.h"

namespace lockstep {
namespace mnist_test {

namespace fs = std::filesystem;
using test_files::complaint;
using test_files::deflated;
using test_files::idx;
using test_files::SmallMnist;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

/// The folder with the real files, if this machine has them.
std::optional<fs::path> real_data_dir() {
  std::vector<fs::path> candidates;
  if (const auto chosen = env_string("LOCKSTEP_DATA_DIR")) candidates.emplace_back(*chosen);
  const fs::path source_dir = fs::absolute(__FILE__).parent_path().parent_path().parent_path();
  candidates.push_back(source_dir.parent_path() / "shared" / "data");
  for (const fs::path& folder : candidates) {
    if (fs::exists(folder / "mnist" / "t10k-labels-idx1-ubyte.gz")) return folder;
  }
  return std::nullopt;
}

class Mnist : public testing::Test {
 protected:
  DatasetSplits load() { return load_mnist(mnist_source(), {.data_dir = folder_.path()}); }
  std::string complaint_now() {
    return complaint<DataError>([&] { load(); });
  }
  fs::path file(const std::string& name) { return folder_.path() / "mnist" / name; }
  TemporaryDirectory folder_;
};

void expect_small(const DatasetSplits& splits) {
  EXPECT_EQ(splits.train.name, "mnist");
  EXPECT_EQ(splits.train.num_classes, 10);
  EXPECT_EQ(splits.train.data.sizes(), (std::vector<int64_t>{6, 28, 28}));
  EXPECT_EQ(splits.train.data.scalar_type(), at::kByte);
  EXPECT_EQ(splits.train.targets.scalar_type(), at::kLong);
  EXPECT_EQ(splits.test.size(), 4);
  EXPECT_EQ(splits.test.targets[1].item<int64_t>(), (3 + 9) % 10);
  EXPECT_EQ(splits.train.data[1][0][2].item<int>(), static_cast<uint8_t>(786 * 7 + 1));
}

TEST_F(Mnist, FindsTheFilesInEachLayout) {
  for (const bool gzip : {false, true}) {
    for (const char* layout : {"", "mnist", "MNIST/raw"}) {
      const TemporaryDirectory folder;
      SmallMnist().write(folder.path() / layout, gzip);
      expect_small(load_mnist(mnist_source(), {.data_dir = folder.path()}));
    }
  }
}

TEST_F(Mnist, WhatIsUnpackedAlreadyCountsInPlaceOfTheFile) {
  SmallMnist().write(folder_.path() / "mnist", true);
  SmallMnist changed;
  changed.train_images[16] = 'x';  // Behind the header of 16 bytes.
  const auto content = std::as_bytes(std::span(changed.train_images));
  const DatasetSplits splits = load_mnist(
      mnist_source(),
      {.data_dir = folder_.path(), .unpacked = {{file("train-images-idx3-ubyte.gz"), content}}});
  expect_small(splits);
  EXPECT_EQ(splits.train.data[0][0][0].item<int>(), 'x');
  EXPECT_EQ(splits.train.data.const_data_ptr(), content.data() + 16);  // No copy.
  EXPECT_EQ(splits.test.data[0][0][0].item<int>(), 0);
}

TEST_F(Mnist, WhatIsUnpackedIsLookedAtAsAFileIs) {
  SmallMnist().write(folder_.path() / "mnist", true);
  const SmallMnist files;
  const fs::path images = file("train-images-idx3-ubyte.gz");
  const auto told = [&](std::string_view content) {
    return complaint<DataError>([&] {
      load_mnist(mnist_source(), {.data_dir = folder_.path(),
                                  .unpacked = {{images, std::as_bytes(std::span(content))}}});
    });
  };
  const std::string_view whole = files.train_images;
  EXPECT_THAT(told(whole.substr(0, whole.size() - 1)),
              HasSubstr(images.string() + ", byte 16 of the decompressed content: "));
  EXPECT_THAT(told(files.train_images + "x"), HasSubstr("more bytes follow"));
  EXPECT_THAT(told({}), HasSubstr("the file is empty"));
  EXPECT_THAT(told(files.train_labels), HasSubstr("expected images"));
}

TEST_F(Mnist, TheFolderIsOneThatHasAllFiles) {
  const DatasetOptions options{.data_dir = folder_.path()};
  EXPECT_EQ(dataset_folder("mnist", options), std::nullopt);
  SmallMnist().write(folder_.path() / "MNIST/raw", true);
  EXPECT_EQ(dataset_folder("mnist", options), folder_.path() / "MNIST/raw");
  EXPECT_EQ(dataset_folder("fashion-mnist", options), std::nullopt);
  fs::remove(folder_.path() / "MNIST/raw/t10k-labels-idx1-ubyte.gz");
  EXPECT_EQ(dataset_folder("mnist", options), std::nullopt);
  EXPECT_THAT(complaint<UsageError>([] { dataset_folder("digits"); }), HasSubstr("'digits'"));
}

TEST_F(Mnist, FashionMnistHasItsOwnFolders) {
  SmallMnist().write(folder_.path() / "FashionMNIST/raw", true);
  EXPECT_EQ(load_mnist(fashion_mnist_source(), {.data_dir = folder_.path()}).train.name,
            "fashion-mnist");
  EXPECT_THAT(complaint_now(), HasSubstr("mnist not found in " + folder_.path().string()));
}

TEST_F(Mnist, RealFilesAreWhole) {
  const auto data_dir = real_data_dir();
  if (!data_dir) GTEST_SKIP() << "no MNIST: set LOCKSTEP_DATA_DIR to a folder that holds mnist/";
  const DatasetSplits splits = load_mnist(mnist_source(), {.data_dir = *data_dir});
  ASSERT_EQ(splits.train.data.sizes(), (std::vector<int64_t>{60000, 28, 28}));
  ASSERT_EQ(splits.test.data.sizes(), (std::vector<int64_t>{10000, 28, 28}));
  // The published checksums are of the files; what follows the headers must be this tensor.
  const auto with_header = [](const at::Tensor& tensor, const std::vector<uint32_t>& shape) {
    const at::Tensor bytes = tensor.to(at::kByte);
    return md5_hex(idx(
        8, shape,
        {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())}));
  };
  EXPECT_EQ(with_header(splits.train.data, {60000, 28, 28}), "6bbc9ace898e44ae57da46a324031adb");
  EXPECT_EQ(with_header(splits.train.targets, {60000}), "a25bea736e30d166cdddb491f175f624");
  EXPECT_EQ(with_header(splits.test.data, {10000, 28, 28}), "2646ac647ad5339dbf082846283269ea");
  EXPECT_EQ(with_header(splits.test.targets, {10000}), "27ae3e4e09519cfbb04c329615203637");
  for (size_t i = 0; i < mnist_source().first_test_labels.size(); ++i)
    EXPECT_EQ(splits.test.targets[static_cast<int64_t>(i)].item<int>(),
              mnist_source().first_test_labels[i]);
}

TEST_F(Mnist, TheOtherSetOfTheSameFormIsRefused) {
  const auto data_dir = real_data_dir();
  if (!data_dir) GTEST_SKIP() << "no MNIST: set LOCKSTEP_DATA_DIR to a folder that holds mnist/";
  const std::string text = complaint<DataError>(
      [&] { load_mnist(fashion_mnist_source(), {.data_dir = *data_dir / "mnist"}); });
  EXPECT_THAT(text, AllOf(HasSubstr("t10k-labels-idx1-ubyte"), HasSubstr("labels of mnist"),
                          HasSubstr("expected those of fashion-mnist")));
}

TEST_F(Mnist, MissingFolderIsNamedWithWhatToDo) {
  const std::string text = complaint<DataError>(
      [&] { load_mnist(mnist_source(), {.data_dir = folder_.path() / "nowhere"}); });
  EXPECT_THAT(
      text, AllOf(HasSubstr("mnist not found in " + (folder_.path() / "nowhere").string()),
                  HasSubstr("--download"), HasSubstr("'digits'"), HasSubstr("LOCKSTEP_DATA_DIR")));
}

TEST_F(Mnist, EmptyFolderSaysWhereItLooked) {
  EXPECT_THAT(complaint_now(),
              AllOf(HasSubstr((folder_.path() / "mnist").string()), HasSubstr("MNIST/raw"),
                    HasSubstr("train-images-idx3-ubyte[.gz]")));
}

TEST_F(Mnist, MissingFilesAreNamed) {
  SmallMnist().write(folder_.path() / "mnist", true);
  fs::remove(file("train-labels-idx1-ubyte.gz"));
  EXPECT_THAT(complaint_now(), AllOf(HasSubstr((folder_.path() / "mnist").string() +
                                               " lacks train-labels-idx1-ubyte[.gz]"),
                                     Not(HasSubstr("t10k"))));
}

TEST_F(Mnist, LabelAboveNineIsNamedWithItsOffset) {
  SmallMnist files;
  files.train_labels[8 + 4] = 10;
  files.write(folder_.path() / "mnist", false);
  EXPECT_THAT(complaint_now(),
              HasSubstr(file("train-labels-idx1-ubyte").string() +
                        ", byte 12: the label of sample 4 is 10; expected 0 to 9"));
}

TEST_F(Mnist, CountsThatDifferAreNamed) {
  SmallMnist files;
  files.test_labels = idx(8, {3}, "\1\2\3");
  files.write(folder_.path() / "mnist", false);
  EXPECT_THAT(complaint_now(),
              AllOf(HasSubstr(file("t10k-images-idx3-ubyte").string() + ", byte 4: 4 images, but "),
                    HasSubstr("has 3 labels"), HasSubstr("belong together")));
}

TEST_F(Mnist, ImagesOfAnotherSizeAreRefused) {
  SmallMnist files;
  files.train_images = idx(8, {6, 27, 28}, std::string(6 * 27 * 28, 'x'));
  files.write(folder_.path() / "mnist", false);
  EXPECT_THAT(complaint_now(), HasSubstr(file("train-images-idx3-ubyte").string() +
                                         ", byte 8: images of 27 x 28; expected 28 x 28"));
}

TEST_F(Mnist, ExchangedFilesAreRefused) {
  SmallMnist files;
  std::swap(files.train_images, files.train_labels);
  files.write(folder_.path() / "mnist", false);
  EXPECT_THAT(complaint_now(),
              AllOf(HasSubstr("has 1 dimensions; expected images"), HasSubstr("exchanged?")));
}

TEST_F(Mnist, WrongTypeIsRefused) {
  SmallMnist files;
  files.train_labels = idx(0x0C, {6}, std::string(24, '\0'));
  files.write(folder_.path() / "mnist", false);
  EXPECT_THAT(complaint_now(), HasSubstr("no IDX file of bytes"));
}

TEST_F(Mnist, NoImagesAreRefused) {
  SmallMnist(0, 1).write(folder_.path() / "mnist", false);
  EXPECT_THAT(complaint_now(), HasSubstr("byte 4: no images; expected at least one"));
}

TEST_F(Mnist, TruncatedAndEmptyFilesAreNamed) {
  SmallMnist files;
  files.train_images.resize(1000);
  files.write(folder_.path() / "mnist", false);
  EXPECT_THAT(complaint_now(), AllOf(HasSubstr(file("train-images-idx3-ubyte").string() +
                                               ", byte 16: the header promises 6 x 28 x 28"),
                                     HasSubstr("at most 984 bytes follow")));
  files.train_images.clear();
  files.write(folder_.path() / "mnist", false);
  EXPECT_THAT(complaint_now(), HasSubstr("byte 0: the file is empty"));
}

}  // namespace mnist_test
}  // namespace lockstep
