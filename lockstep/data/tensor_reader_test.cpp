// What Python writes is read in tests/interop/test_checkpoints.py.
#include "lockstep/data/tensor_reader.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "tests/support/test_files.h"

namespace lockstep {
namespace tensor_reader_test {

using testing::HasSubstr;
using testing::ThrowsMessage;

/// A shard of the tensor "x", whose first element is at (`row`, `column`) of it.
void write_shard(const std::filesystem::path& file, const at::Tensor& shard, int row, int column) {
  const std::string offsets = "[" + std::to_string(row) + ", " + std::to_string(column) + "]";
  save_safetensors(file, {{"x", shard}},
                   {{"DCP_SHARDING_INFO", R"({"x": {"saved_offsets": )" + offsets + "}}"}});
}

class Shards : public testing::Test {
 protected:
  void write(const std::string& name, int row, int rows, int column, int columns) {
    write_shard(folder_.path() / (name + ".safetensors"),
                whole_.narrow(0, row, rows).narrow(1, column, columns), row, column);
  }

  const TemporaryDirectory folder_;
  const at::Tensor whole_ = at::arange(24, at::kFloat).view({4, 6});
};

TEST_F(Shards, BoxesAreReadOverAllShards) {
  write("a", 0, 2, 0, 6);
  write("b", 2, 2, 0, 2);
  write("c", 2, 2, 2, 4);
  write("replica", 0, 2, 0, 6);
  const TensorReader reader(folder_.path());
  ASSERT_EQ(reader.tensors().size(), 1u);
  EXPECT_EQ(reader.tensors()[0].shape, (std::vector<int64_t>{4, 6}));
  EXPECT_TRUE(reader.read("x").equal(whole_));
  EXPECT_TRUE(reader.read("x", {1, 1}, {2, 4}).equal(whole_.narrow(0, 1, 2).narrow(1, 1, 4)));
  EXPECT_EQ(reader.read("x", {4, 0}, {0, 6}).numel(), 0);
  EXPECT_THROW(reader.read("x", {3, 0}, {2, 6}), UsageError);
  EXPECT_THROW(reader.read("x", {0}, {1}), UsageError);
  EXPECT_THROW(reader.read("y"), DataError);
}

TEST_F(Shards, AHoleIsRefused) {
  write("a", 0, 2, 0, 6);
  write("c", 2, 2, 2, 4);
  EXPECT_THROW(TensorReader(folder_.path()), DataError);
}

TEST_F(Shards, AnOverlapIsRefused) {
  write("a", 0, 3, 0, 6);
  write("b", 2, 2, 0, 6);
  EXPECT_THROW(TensorReader(folder_.path()), DataError);
}

TEST_F(Shards, TwoFilesWithATensorOfOneNameAreNoShards) {
  for (const char* name : {"a.safetensors", "b.safetensors"})
    save_safetensors(folder_.path() / name, {{"x", whole_}});
  EXPECT_THROW(TensorReader(folder_.path()), DataError);
}

TEST_F(Shards, AnIndexSaysWhichFilesCount) {
  save_safetensors(folder_.path() / "model.safetensors", {{"x", whole_}});
  save_safetensors(folder_.path() / "other.safetensors", {{"x", whole_}});
  const auto index = folder_.path() / "model.safetensors.index.json";
  test_files::write(index, R"({"weight_map": {"x": "model.safetensors"}})");
  EXPECT_TRUE(TensorReader(folder_.path()).read("x").equal(whole_));
  test_files::write(index, R"({"weight_map": {"x": "model.safetensors", "y": "lost"}})");
  EXPECT_THROW(TensorReader(folder_.path()), DataError);
}

TEST_F(Shards, AFewBytesDoNotAskForMuchMemory) {
  const auto path = folder_.path() / "x.pt";
  // Python's torch.zeros(1).expand(2 ** 40), of 4 bytes.
  const std::string pickle(
      "\x80\x02}X\x01\0\0\0x"
      "ctorch._utils\n_rebuild_tensor_v2\n"
      "((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0"
      "0X\x03\0\0\0"
      "cpuK\x01tQ"
      "K\0\x8a\x06\0\0\0\0\0\x01\x85K\0\x85\x89"
      "ccollections\nOrderedDict\n)RtRs.",
      140);
  test_files::write(path, test_files::zip({{"archive/data.pkl", pickle, false},
                                           {"archive/data/0", std::string(4, '\0'), false}}));
  const TensorReader reader(path);
  ASSERT_EQ(reader.tensors().size(), 1u);
  EXPECT_EQ(reader.tensors()[0].shape, (std::vector<int64_t>{int64_t{1} << 40}));
  EXPECT_THROW(reader.read("x"), DataError);
  EXPECT_EQ(reader.read("x", {7}, {2}).numel(), 2);
}

TEST_F(Shards, AFileOfAnotherKindIsToldPlainly) {
  const auto path = folder_.path() / "x";
  const auto complaint = [&](const std::string& content) {
    test_files::write(path, content);
    return [&] { TensorReader reader(path); };
  };
  EXPECT_THAT(complaint("\x89PNG\r\n\x1a\n and so on"),
              ThrowsMessage<DataError>(HasSubstr("neither a safetensors file nor a .pt file")));
  EXPECT_THAT(complaint("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8"),
              ThrowsMessage<DataError>(HasSubstr("before PyTorch 1.6")));
}

TEST_F(Shards, AConversionThatFailsLeavesNoFile) {
  write("a", 0, 4, 0, 6);
  const TensorReader reader(folder_.path());
  std::filesystem::resize_file(folder_.path() / "a.safetensors", 100);
  EXPECT_THROW(convert_tensors(reader, folder_.path() / "out", "hf"), Error);
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path() / "out"));
}

TEST_F(Shards, ConvertNeedsANewFolder) {
  write("a", 0, 4, 0, 6);
  const TensorReader reader(folder_.path());
  EXPECT_THROW(convert_tensors(reader, folder_.path(), "hf"), UsageError);
  convert_tensors(reader, folder_.path() / "out", "hf");
  EXPECT_TRUE(TensorReader(folder_.path() / "out").read("x").equal(whole_));
}

/// Python's save_model writes one of the names of tied tensors, and the others into the metadata.
TEST(TensorReader, TiedNamesOfTheMetadataAreTensors) {
  TemporaryDirectory folder;
  const auto path = folder.path() / "tied.safetensors";
  const at::Tensor weight = at::arange(6, at::kFloat).view({2, 3});
  save_safetensors(path, {{"m.weight", weight}, {"m.bias", at::ones({2})}},
                   {{"format", "pt"}, {"n.weight", "m.weight"}, {"m.bias", "m.weight"}});
  const TensorReader reader(path);
  ASSERT_EQ(reader.tensors().size(), 3);
  EXPECT_TRUE(at::equal(reader.read("n.weight"), weight));
  EXPECT_TRUE(at::equal(reader.read("m.bias"), at::ones({2}))) << "what is there counts";
  convert_tensors(reader, folder.path() / "tied.pt", "pt");
  EXPECT_TRUE(at::equal(TensorReader(folder.path() / "tied.pt").read("n.weight"), weight));
}

}  // namespace tensor_reader_test
}  // namespace lockstep
