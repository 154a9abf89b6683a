// What Python writes and reads is compared in tests/interop/data_files_test.py.
#include "lockstep/data/tensor_reader.h"

#include <ATen/ops/ones.h>
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
  save_pt(path, {{"weight", tied}, {"again", tied}, {"other", at::ones({3, 4})}});
  const StateDict tensors = load_pt(path).tensors;
  ASSERT_EQ(tensors.size(), 3u);
  EXPECT_TRUE(tensors[0].second.is_alias_of(tensors[1].second));
  EXPECT_FALSE(tensors[0].second.is_alias_of(tensors[2].second));
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
  refuses(pickled("\x80\x02]q"));                         // Cut short.
  refuses(pickled(std::string("\x80\x02]q\0h\0a.", 9)));  // A list that contains itself.
  refuses(
      pickled("\x80\x02"
              "ctorch._utils\n_rebuild_sparse_tensor\n)R."));
}

}  // namespace pt_file_test
}  // namespace lockstep
