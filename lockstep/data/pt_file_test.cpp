// What Python writes and reads is compared in tests/interop/data_files_test.py.
#include "lockstep/data/tensor_reader.h"

#include <ATen/ops/_neg_view.h>
#include <ATen/ops/full.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <string>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "tests/support/test_files.h"

namespace lockstep {
namespace pt_file_test {

TEST(PtFile, TensorsThatShareAStorageShareItAgain) {
  const TemporaryDirectory folder;
  const auto path = folder.path() / "tied.pt";
  const at::Tensor tied = at::ones({3, 4});
  EXPECT_THROW(save_pt(path, {{"x", tied}, {"x", tied}}), UsageError);
  save_pt(path, {{"weight", tied}, {"again", tied}, {"other", at::ones({3, 4})}});
  const StateDict tensors = load_pt(path).tensors;
  ASSERT_EQ(tensors.size(), 3u);
  EXPECT_TRUE(tensors[0].second.is_alias_of(tensors[1].second));
  EXPECT_FALSE(tensors[0].second.is_alias_of(tensors[2].second));
}

TEST(PtFile, LazyNegativesAndConjugatesAreWrittenAsTheyAre) {
  const TemporaryDirectory folder;
  const at::Tensor z = at::randn({3, 2}, at::kComplexFloat);
  const at::Tensor negative = at::imag(z.conj());
  ASSERT_TRUE(negative.is_neg());
  const at::Tensor contiguous = at::_neg_view(at::ones({4}));
  save_pt(folder.path() / "x.pt", {{"conj", z.conj()}, {"imag", negative}, {"neg", contiguous}});
  const StateDict tensors = load_pt(folder.path() / "x.pt").tensors;
  EXPECT_TRUE(tensors[0].second.equal(z.conj()));
  EXPECT_TRUE(tensors[1].second.equal(negative));
  EXPECT_TRUE(tensors[2].second.equal(at::full({4}, -1.0)));
}

TEST(PtFile, WhatIsNoFileOfTensorsIsADataError) {
  const TemporaryDirectory folder;
  const auto path = folder.path() / "x.pt";
  const auto refuses = [&](const std::string& content) {
    test_files::write(path, content);
    EXPECT_THROW(load_pt(path), DataError);
  };
  refuses("no zip archive");
  refuses(test_files::zip({{"archive/readme", "text", false}}));
  const auto pickled = [](const std::string& pickle) {
    return test_files::zip({{"archive/data.pkl", pickle, false}});
  };
  refuses(pickled("\x80\x02]q"));  // Cut short.
  refuses(
      pickled("\x80\x02"
              "ctorch._utils\n_rebuild_tensor_v2\n]NaR."));  // Of a tensor that is None.
}

}  // namespace pt_file_test
}  // namespace lockstep
