#include "lockstep/data/named_sets.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>

#include "lockstep/base/file.h"
#include "lockstep/data/loader.h"
#include "tests/support/test_files.h"

namespace lockstep {
namespace text_test {

using test_files::complaint;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

/// [N, 2].
at::Tensor rows(const std::vector<int64_t>& values) {
  return at::tensor(values, at::kLong).view({-1, 2});
}

class Text : public ::testing::Test {
 protected:
  std::filesystem::path file(std::string_view content) {
    test_files::write(folder_.path() / "a.txt", content);
    return folder_.path() / "a.txt";
  }
  DatasetSplits load(std::string_view content, int64_t context, int64_t stride = 0,
                     double test_fraction = 0.5) {
    return load_text(file(content),
                     {.test_fraction = test_fraction, .context = context, .stride = stride});
  }

 private:
  TemporaryDirectory folder_;
};

TEST_F(Text, TokensAreTheCharactersInTheirOrder) {
  const DatasetSplits splits = load("cabbages and", 2);
  EXPECT_THAT(splits.train.classes, ElementsAre(" ", "a", "b", "c", "d", "e", "g", "n", "s"));
  EXPECT_EQ(splits.train.num_classes, 9);
  EXPECT_EQ(splits.test.num_classes, 9);  // of the whole text
  // "cabbag": windows "ca", "bb", each with the character after it.
  EXPECT_TRUE(at::equal(splits.train.data, rows({3, 1, 2, 2})));
  EXPECT_TRUE(at::equal(splits.train.targets, rows({1, 2, 2, 1})));
  // "es and": no character of the part before.
  EXPECT_TRUE(at::equal(splits.test.data, rows({5, 8, 0, 1})));
  EXPECT_TRUE(at::equal(splits.test.targets, rows({8, 0, 1, 7})));
}

TEST_F(Text, WindowsMayOverlapInTheSameMemory) {
  const DatasetSplits splits = load("abcdefgh", 2, /*stride=*/1);
  EXPECT_TRUE(at::equal(splits.train.data, rows({0, 1, 1, 2})));
  EXPECT_TRUE(at::equal(splits.train.targets, rows({1, 2, 2, 3})));
  EXPECT_EQ(splits.train.data.storage().nbytes(), 8 * sizeof(int64_t));
  DataLoader loader(splits.train, DistributedSampler({.dataset_size = 2, .shuffle = false}), {},
                    {.batch_size = 2});
  loader.epoch(0);
  Batch batch;
  ASSERT_TRUE(loader.next(batch));
  EXPECT_TRUE(at::equal(batch.data, splits.train.data));
  EXPECT_TRUE(at::equal(batch.target, splits.train.targets));
}

TEST_F(Text, CharactersAreThoseOfUtf8) {
  const std::string text = "a\xC3\xA4\xE2\x82\xAC\xF0\x9F\x98\x80";  // a, ae, Euro, a face
  const DatasetSplits splits = load(text + text, 2);
  EXPECT_THAT(splits.train.classes,
              ElementsAre("a", "\xC3\xA4", "\xE2\x82\xAC", "\xF0\x9F\x98\x80"));
  EXPECT_TRUE(at::equal(splits.train.data, rows({0, 1})));
}

TEST_F(Text, WhatIsNoUtf8IsTakenByteByByte) {
  for (const std::string wrong : {"\xFF", "\xC3", "\xC0\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80"}) {
    const std::string text = "abcd" + wrong;
    const DatasetSplits splits = load(text, 1);
    const int64_t characters = splits.train.size() + 1 + splits.test.size() + 1;
    EXPECT_EQ(characters, static_cast<int64_t>(text.size())) << ::testing::PrintToString(wrong);
  }
}

TEST_F(Text, ATextThatIsTooShortIsNamed) {
  EXPECT_THAT(complaint<DataError>([&] { load("abcdef", 3); }),
              HasSubstr("the training part has 3 characters; expected at least 4"));
  EXPECT_THAT(complaint<DataError>([&] { load("abcdef", 3, 0, 0.2); }),
              HasSubstr("the held-out part has 2 characters; expected at least 4"));
  EXPECT_THAT(complaint<DataError>([&] { load("", 3); }), HasSubstr("has 0 characters"));
  EXPECT_THAT(complaint<UsageError>([&] { load("abcdef", 0); }), HasSubstr("a context of 0"));
  EXPECT_THAT(complaint<DataError>([&] { load_text("/no/such.txt", {}); }),
              AllOf(HasSubstr("/no/such.txt"), HasSubstr("--dataset")));
}

TEST_F(Text, IsADataSetByName) {
  const auto path = file(std::string(40, 'x') + std::string(40, 'y'));
  const DatasetSplits splits = load_dataset("text:" + path.string(), {.context = 7});
  EXPECT_EQ(splits.train.name, "text:" + path.string());
  EXPECT_EQ(splits.train.size(), 10);  // 72 characters
  EXPECT_EQ(splits.test.size(), 1);
  EXPECT_THAT(complaint<UsageError>([] { load_dataset("text:"); }),
              HasSubstr("'text:' names no file"));
  EXPECT_THAT(complaint<UsageError>([] { check_dataset_name("--dataset", "txt:a"); }),
              HasSubstr("text:PATH"));
}

}  // namespace text_test
}  // namespace lockstep
